//! IPv4 options and IPv6 extension headers between an IP header and a transport.

use crate::packets::packet_tests;

packet_tests! {
    options:
    options_shift_transport_and_stay,
    options_stay_where_source_changes,
    answers_have_no_options_and_quote_none,
    extension_headers_are_walked,
    untranslatable_headers_are_left_alone,
}
