//! The attributes of a netlink message, by attribute number.

use std::str;

use anyhow::{Context, Result, bail};

/// The length of an attribute's header, which the attribute's length includes.
const HEAD_LEN: usize = 4;
/// The bits of a type that contain the number instead of flags (linux/netlink.h).
const NLA_TYPE_MASK: u16 = 0x3fff;

/// The attributes at one level of a message.
#[derive(Debug, Default)]
pub(crate) struct Attrs<'a>(Vec<(u16, &'a [u8])>);

impl<'a> Attrs<'a> {
    /// Splits attributes: length, type, value, and padding to four bytes.
    pub(crate) fn parse(mut bytes: &'a [u8]) -> Result<Self> {
        let mut attributes = Vec::new();
        while !bytes.is_empty() {
            let [len0, len1, kind0, kind1, ..] = *bytes else {
                bail!("an attribute of netfilter is cut off")
            };
            let len = usize::from(u16::from_ne_bytes([len0, len1]));
            let value = bytes
                .get(HEAD_LEN..len)
                .context("an attribute of netfilter has a wrong length")?;
            attributes.push((u16::from_ne_bytes([kind0, kind1]) & NLA_TYPE_MASK, value));
            bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
        }
        Ok(Self(attributes))
    }

    /// Returns the values of all attributes with this number.
    pub(crate) fn all(&self, kind: u16) -> impl Iterator<Item = &'a [u8]> {
        self.0
            .iter()
            .filter(move |(found, _)| *found == kind)
            .map(|(_, value)| *value)
    }

    pub(crate) fn get(&self, kind: u16) -> Option<&'a [u8]> {
        self.all(kind).next()
    }

    pub(crate) fn has(&self, kind: u16) -> bool {
        self.get(kind).is_some()
    }

    /// Returns true if an attribute has another number.
    pub(crate) fn has_others(&self, kind: u16) -> bool {
        self.0.iter().any(|(found, _)| *found != kind)
    }

    /// Returns true if an attribute has a number outside `kinds`.
    pub(crate) fn has_others_than(&self, kinds: &[u16]) -> bool {
        self.0.iter().any(|(found, _)| !kinds.contains(found))
    }

    /// Returns a number, which netfilter sends in network byte order; `None` if it is missing.
    pub(crate) fn u32(&self, kind: u16) -> Option<u32> {
        Some(u32::from_be_bytes(self.get(kind)?.try_into().ok()?))
    }

    pub(crate) fn text(&self, kind: u16) -> Option<&'a str> {
        let text = str::from_utf8(self.get(kind)?).ok()?;
        Some(text.trim_end_matches('\0'))
    }

    /// Returns the attributes nested in an attribute; empty if the attribute is missing.
    pub(crate) fn inside(&self, kind: u16) -> Result<Self> {
        self.get(kind)
            .map_or_else(|| Ok(Self::default()), Self::parse)
    }
}
