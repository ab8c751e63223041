//! Closed choices of the configuration: enums in Rust, names in documents and flags.

use clap::ValueEnum;
use clap::builder::{PossibleValue, Resettable};
use proxy_common::frontend::Algorithm;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serializer};

use proxy_core::health::HealthMode;
use proxy_core::model::{ALGORITHMS, ExternalForwarding, algorithm_name};

/// Returns the names of all values, without their help.
pub(super) fn values<T: ValueEnum>() -> Vec<PossibleValue> {
    let values = T::value_variants().iter().filter_map(T::to_possible_value);
    values.map(|value| value.help(Resettable::Reset)).collect()
}

/// Returns the error text for a value outside `values`.
pub(super) fn must_be_one_of(values: &[PossibleValue]) -> String {
    let names: Vec<_> = values.iter().map(PossibleValue::get_name).collect();
    format!("must be one of {}", names.join(", "))
}

pub(crate) fn name<T: ValueEnum>(value: &T) -> String {
    value
        .to_possible_value()
        .map(|value| value.get_name().to_owned())
        .unwrap_or_default()
}

pub(super) fn serialize<T: ValueEnum, S: Serializer>(value: &T, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&name(value))
}

pub(super) fn deserialize<'de, T: ValueEnum, D: Deserializer<'de>>(from: D) -> Result<T, D::Error> {
    read(&String::deserialize(from)?).map_err(D::Error::custom)
}

fn read<T: ValueEnum>(text: &str) -> Result<T, String> {
    T::from_str(text, false).map_err(|_| must_be_one_of(&values::<T>()))
}

/// An optional choice; an empty text is `None`.
pub(super) mod or_empty {
    use super::*;

    pub(in crate::config) fn serialize<T: ValueEnum, S: Serializer>(
        value: &Option<T>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.serialize_str(&value.as_ref().map(name).unwrap_or_default())
    }

    pub(in crate::config) fn deserialize<'de, T, D>(from: D) -> Result<Option<T>, D::Error>
    where
        T: ValueEnum,
        D: Deserializer<'de>,
    {
        match String::deserialize(from)?.as_str() {
            "" => Ok(None),
            text => read(text).map(Some).map_err(D::Error::custom),
        }
    }
}

/// The action for unresponsive backends. Its values have the annotation's names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BackendHealth(pub HealthMode);

impl ValueEnum for BackendHealth {
    fn value_variants<'a>() -> &'a [Self] {
        const ALL: [BackendHealth; HealthMode::ALL.len()] = [
            BackendHealth(HealthMode::ALL[0]),
            BackendHealth(HealthMode::ALL[1]),
            BackendHealth(HealthMode::ALL[2]),
        ];
        &ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(self.0.name()))
    }
}

/// The way of external clients, with the annotation's names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Forwarding(pub ExternalForwarding);

impl ValueEnum for Forwarding {
    fn value_variants<'a>() -> &'a [Self] {
        const ALL: [Forwarding; ExternalForwarding::ALL.len()] = [
            Forwarding(ExternalForwarding::ALL[0]),
            Forwarding(ExternalForwarding::ALL[1]),
        ];
        &ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(self.0.name()))
    }
}

/// A load-balancing algorithm, with the annotation's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LbAlgorithm(pub Algorithm);

impl Default for LbAlgorithm {
    fn default() -> Self {
        Self(Algorithm::RANDOM)
    }
}

impl ValueEnum for LbAlgorithm {
    fn value_variants<'a>() -> &'a [Self] {
        const ALL: [LbAlgorithm; ALGORITHMS.len()] = {
            let mut all = [LbAlgorithm(ALGORITHMS[0].1); ALGORITHMS.len()];
            let mut at = 1;
            while at < all.len() {
                all[at] = LbAlgorithm(ALGORITHMS[at].1);
                at += 1;
            }
            all
        };
        &ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(algorithm_name(self.0)))
    }
}
