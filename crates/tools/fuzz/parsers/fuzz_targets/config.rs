//! Any text as a configuration file: refused with a reason, or else what it means can be written
//! down and read again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use proxy_agent::config::Configuration;

fuzz_target!(|text: &str| {
    let configuration = match Configuration::parse(text) {
        Ok(configuration) => configuration,
        Err(error) => return assert!(!format!("{error:#}").is_empty()),
    };
    let written = configuration.to_yaml().expect("what was read can be written");
    let again = Configuration::parse(&written).unwrap_or_else(|error| panic!("{error:#}: {written}"));
    assert_eq!(again.to_yaml().expect("what was read can be written"), written);
});
