//! The weights of endpoints: their shares of a Service's new flows.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::net::IpAddr;

use super::read::{Reader, Skipped, ip};
use crate::compact::{self, EndpointSlice, WEIGHT, WEIGHTS, WEIGHTS_LEN_MAX};

/// The weight without an annotation.
const DEFAULT: u16 = 1;
/// The maximum weight. Larger ratios would be lost to rounding in a look-up table of 4,093 entries.
pub const WEIGHT_MAX: u16 = 1_000;

/// The maximum number of bad list elements in a report.
const BAD_NAMED: usize = 8;

/// The weights in a Service's annotation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Weights {
    by_addr: BTreeMap<IpAddr, u16>,
    /// By pod name.
    by_name: BTreeMap<Box<str>, u16>,
}

impl Weights {
    /// Parses a Service's list: `NAME=WEIGHT` or `ADDRESS=WEIGHT`, separated by commas or blanks. A
    /// bad element costs only itself.
    pub fn of(service: &compact::Service, skipped: &mut Vec<Skipped>) -> Self {
        let mut weights = Self::default();
        let Some(text) = &service.weights else {
            return weights;
        };
        let mut reader = Reader::new("Service", &service.name, skipped);
        let mut skip =
            |why: String| reader.skip(format_args!("metadata.annotations[{WEIGHTS}]"), why);
        if text.len() > WEIGHTS_LEN_MAX {
            skip(format!("longer than {WEIGHTS_LEN_MAX} bytes, ignored"));
            return weights;
        }
        let elements = text
            .split([',', ' ', '\n', '\t', '\r'])
            .filter(|element| !element.is_empty());
        let bad: Vec<_> = elements
            .filter_map(|element| weights.add(element).err())
            .collect();
        let more = bad.len().saturating_sub(BAD_NAMED);
        bad.into_iter().take(BAD_NAMED).for_each(&mut skip);
        if more > 0 {
            skip(format!("{more} more elements mean nothing"));
        }
        weights
    }

    fn add(&mut self, element: &str) -> Result<(), String> {
        let why = || format!("{element:?} is not NAME=WEIGHT or ADDRESS=WEIGHT");
        let (name, number) = element
            .split_once('=')
            .filter(|(name, _)| !name.is_empty())
            .ok_or_else(why)?;
        let number = weight(number).map_err(|why| format!("{name}: {why}"))?;
        let is_new = match ip(name) {
            Ok(addr) => put(self.by_addr.entry(addr), number),
            Err(_) => put(self.by_name.entry(name.into()), number),
        };
        if is_new {
            Ok(())
        } else {
            Err(format!("{name} is listed before"))
        }
    }

    /// Returns the weight by address, else by pod name, else the slice's.
    pub(super) fn of_endpoint(
        &self,
        addr: IpAddr,
        endpoint: &compact::Endpoint,
        of_slice: u16,
    ) -> u16 {
        let by_name = || {
            endpoint
                .pod
                .as_ref()?
                .name
                .as_ref()
                .and_then(|name| self.by_name.get(name))
        };
        self.by_addr
            .get(&addr)
            .or_else(by_name)
            .copied()
            .unwrap_or(of_slice)
    }
}

pub(super) fn of_slice(reader: &mut Reader<'_>, slice: &EndpointSlice) -> u16 {
    let given = slice.weight.as_deref().and_then(|text| {
        reader.take(
            format_args!("metadata.annotations[{WEIGHT}]"),
            weight(text.trim()),
        )
    });
    given.unwrap_or(DEFAULT)
}

fn put<K: Ord>(entry: Entry<'_, K, u16>, weight: u16) -> bool {
    match entry {
        Entry::Vacant(entry) => {
            entry.insert(weight);
            true
        }
        Entry::Occupied(_) => false,
    }
}

fn weight(text: &str) -> Result<u16, String> {
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
    let weight = text
        .parse()
        .ok()
        .filter(|weight| is_number && *weight <= WEIGHT_MAX);
    weight.ok_or_else(|| {
        format!("{text:?} is not a weight: expected an integer from 0 to {WEIGHT_MAX}")
    })
}
