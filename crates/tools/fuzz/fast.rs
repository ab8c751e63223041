//! The settings of the fast path. They may change between any two packets, as rules, filters and
//! agents do.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use proxy_common::device;
use rand::RngExt;
use testbed::reference::facts::FastFacts;
use testbed::reference::generate::Dice;
use testbed::reference::place::{Device, FAR, Family, Net, PODS};

/// The networks between which the stack leaves packets unchanged: pods of this node, except those
/// behind the bridge, and pods of other nodes.
pub(crate) const UNCHANGED: [Net; 2] = [PODS, FAR];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fast(u16);

impl Fast {
    pub(crate) const NOTHING: Self = Self(0);
    /// Flows opened through the stack may skip it.
    pub(crate) const OTHERS: Self = Self(1 << 0);
    /// New connections may bypass the stack, ...
    pub(crate) const OPENS: Self = Self(1 << 1);
    /// ... but only between addresses of [`UNCHANGED`].
    pub(crate) const OPENS_PODS: Self = Self(1 << 2);
    /// Connections that bypass the stack may continue to do so.
    pub(crate) const KEEPS: Self = Self(1 << 3);
    /// The agent has recently confirmed that it watches the rules.
    pub(crate) const LEASE: Self = Self(1 << 4);
    /// Only kpx's programs process the device's packets.
    const POD_BARE: Self = Self(1 << 5);
    const BRIDGE_BARE: Self = Self(1 << 6);
    /// The device with an address is an end of a veth pair too.
    const BRIDGE_PEER: Self = Self(1 << 7);
    const UPLINK_BARE: Self = Self(1 << 8);
    /// Connections to pods of other nodes may bypass the stack too.
    pub(crate) const OPENS_FAR: Self = Self(1 << 9);
    /// Flows opened through the stack may skip it once the agent has allowed each of them.
    pub(crate) const OPENED: Self = Self(1 << 10);
    /// The same for UDP flows of outside clients.
    pub(crate) const OPENED_OUTSIDE: Self = Self(1 << 11);
    const ALL: u16 = (1 << 12) - 1;

    const WORDS: [(&'static str, Self); 12] = [
        ("others", Self::OTHERS),
        ("opens", Self::OPENS),
        ("pods", Self::OPENS_PODS),
        ("keeps", Self::KEEPS),
        ("lease", Self::LEASE),
        ("pod-bare", Self::POD_BARE),
        ("bridge-bare", Self::BRIDGE_BARE),
        ("bridge-peer", Self::BRIDGE_PEER),
        ("uplink-bare", Self::UPLINK_BARE),
        ("far", Self::OPENS_FAR),
        ("opened", Self::OPENED),
        ("outside", Self::OPENED_OUTSIDE),
    ];

    /// Mostly allows bypass connections, often with a single obstacle.
    pub(crate) fn random(dice: &mut Dice) -> Self {
        let opens = Self::ALL & !(Self::OPENS_PODS.0 | Self::OTHERS.0);
        let others = dice.random_range(0..=Self::ALL) & (Self::OPENS_PODS.0 | Self::OTHERS.0);
        match dice.random_range(0..10) {
            0..4 => Self(opens | others),
            4..7 => Self((opens | others) & !(1 << dice.random_range(0..12))),
            _ => Self(dice.random_range(0..=Self::ALL)),
        }
    }

    pub(crate) fn has(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// Returns true if any packet may skip the stack.
    pub(crate) fn is_on(self) -> bool {
        let opens = [Self::OPENS, Self::OPENS_PODS, Self::OPENS_FAR];
        let others = [
            Self::OTHERS,
            Self::KEEPS,
            Self::OPENED,
            Self::OPENED_OUTSIDE,
        ];
        opens.into_iter().chain(others).any(|bit| self.has(bit))
    }

    pub(crate) fn opens(self) -> bool {
        self.has(Self::OPENS) && self.has(Self::LEASE)
    }

    pub(crate) fn is_bare(self, device: Device) -> bool {
        match device {
            Device::Pod => self.has(Self::POD_BARE),
            Device::Bridge => self.has(Self::BRIDGE_BARE),
            Device::Uplink => self.has(Self::UPLINK_BARE),
            _ => false,
        }
    }

    pub(crate) fn has_peer(self, device: Device) -> bool {
        device == Device::Pod || device == Device::Bridge && self.has(Self::BRIDGE_PEER)
    }

    pub(crate) fn words(self) -> String {
        let words = Self::WORDS.into_iter().filter(|(_, bit)| self.has(*bit));
        words.map(|(word, _)| word).collect::<Vec<_>>().join(" ")
    }

    pub(crate) fn read(words: &[&str]) -> Result<Self> {
        words.iter().try_fold(Self::NOTHING, |fast, word| {
            let known = Self::WORDS.into_iter().find(|(known, _)| known == word);
            Ok(Self(
                fast.0
                    | known
                        .with_context(|| format!("{word}: no word of the fast path"))?
                        .1
                        .0,
            ))
        })
    }

    /// Returns the settings in the programs' form, without the lease.
    pub(crate) fn facts(self) -> FastFacts {
        let bits = [
            (Self::OTHERS, device::Node::FAST_PATH),
            (Self::OPENS, device::Node::FAST_OPEN),
            (Self::OPENS_PODS, device::Node::FAST_OPEN_PODS),
            (Self::OPENS_FAR, device::Node::FAST_OPEN_FAR),
            (Self::KEEPS, device::Node::FAST_KEEP),
            (Self::OPENED, device::Node::FAST_OPENED),
            (Self::OPENED_OUTSIDE, device::Node::FAST_OPENED_OUTSIDE),
        ];
        let node = bits
            .into_iter()
            .filter(|(bit, _)| self.has(*bit))
            .fold(0, |flags, (_, flag)| flags | flag);
        let of = |device| {
            let flag = |is_set, flag| if is_set { flag } else { 0 };
            flag(self.is_bare(device), device::Device::BARE)
                | flag(self.has_peer(device), device::Device::PEER)
        };
        let devices = BTreeMap::from(
            [Device::Pod, Device::Bridge, Device::Uplink].map(|device| (device, of(device))),
        );
        let unchanged = UNCHANGED
            .iter()
            .flat_map(|net| Family::ALL.map(|family| net.cidr(family)))
            .collect();
        FastFacts {
            node,
            devices,
            unchanged,
        }
    }
}
