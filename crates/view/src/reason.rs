//! Names of reasons on the command line.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use proxy_common::counter::Reason;

/// The names in the previous release, each with its current name.
const OLD_NAMES: [(&str, Reason); 1] = [("forged", Reason::Spoofed)];

/// Parses the name of a [`Reason`], and replaces a name of the previous release.
pub fn reason_parser() -> impl TypedValueParser<Value = String> {
    let values = Reason::ALL.map(|reason| {
        let old = OLD_NAMES.into_iter().filter(|(_, new)| *new == reason);
        PossibleValue::new(reason.name()).aliases(old.map(|(old, _)| old))
    });
    PossibleValuesParser::new(values).map(|name| {
        let today = OLD_NAMES.into_iter().find(|(old, _)| *old == name);
        today.map_or(name, |(_, reason)| reason.name().to_owned())
    })
}
