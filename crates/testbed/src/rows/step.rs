//! Steps between rows: changes of the node, its devices and its network, and elapsed time.

use std::net::IpAddr;
use std::str::FromStr;

use anyhow::{Context, Result};
use ipnet::IpNet;
use proxy_common::addr::{Addr, Addr4, Addr6};
use proxy_common::device::{Device, Node};

/// The fixture of a section; `room` is the number of flow entries, by default a node's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Plain { room: Option<u32> },
    Services { room: Option<u32> },
    External { room: Option<u32> },
    Fast,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// `come in by pod0`
    ComeInBy(String),
    /// `host path carries received packets`, or `own`
    HostPathCarriesReceived(bool),
    /// `node flags compat detects4`, or `none`
    NodeFlags(u32),
    /// `node has no address`
    NodeHasNoAddress,
    /// `lo is pod peer; pod0 is unhooked`
    Devices(Vec<(String, Option<Device>)>),
    /// `pod addresses 10.244.0.0/16`
    PodAddresses(Vec<IpNet>),
    /// `ip route del {far} dev eth1`
    Ip(String),
    /// `backend of udp pair:53 moves from pod to far`
    BackendMoves {
        service: String,
        port: u16,
        old: String,
        new: String,
    },
    /// `flood of 32 openers`
    Flood(u16),
    /// `forget flows`
    ForgetFlows,
    /// `agent tolerates flows` with a request, or `no flows`
    MakeLiberal(bool),
    /// `connections of web:80 to pod:8080 end`
    ConnectionsEnd { service: String, backend: String },
    /// `silence 3 s`
    Silence(u32),
    /// `segments of 1000 bytes`, or `no segments`
    Segments(u32),
    /// `frames are for another host`, or `for this node`
    FramesForOthers(bool),
}

/// An invalid word, and the reason.
type Wrong = (String, String);

const NODE_FLAGS: [(&str, u32); 17] = [
    ("none", 0),
    ("cluster_ip_external", Node::CLUSTER_IP_EXTERNAL),
    ("compat", Node::COMPAT),
    ("detects4", Node::DETECTS4),
    ("detects6", Node::DETECTS6),
    ("draining", Node::DRAINING),
    ("fast_path", Node::FAST_PATH),
    ("fast_open", Node::FAST_OPEN),
    ("fast_keep", Node::FAST_KEEP),
    ("fast_opened", Node::FAST_OPENED),
    ("fast_opened_outside", Node::FAST_OPENED_OUTSIDE),
    ("fast_open_pods", Node::FAST_OPEN_PODS),
    ("fast_open_far", Node::FAST_OPEN_FAR),
    ("masquerade_all", Node::MASQUERADE_ALL),
    ("stacked", Node::STACKED),
    ("filtered", Node::FILTERED),
    ("macvlans", Node::MACVLANS),
];
const DEVICE_FLAGS: [(&str, u32); 9] = [
    ("uplink", 0),
    ("pod", Device::POD),
    ("pod_bridge", Device::POD_BRIDGE),
    ("detected", Device::DETECTED),
    ("loose", Device::LOOSE),
    ("filtered", Device::FILTERED),
    ("bare", Device::BARE),
    ("peer", Device::PEER),
    ("strict4", Device::STRICT4),
];

/// Returns the union of the flags in `words`.
fn flags(words: &str, known: &[(&str, u32)], what: &str) -> Result<u32, Wrong> {
    words.split_whitespace().try_fold(0, |flags, word| {
        let flag = known.iter().find(|(name, _)| *name == word);
        let (_, flag) =
            flag.ok_or_else(|| (word.to_owned(), format!("no {what} is called {word:?}")))?;
        Ok(flags | flag)
    })
}

fn number<T: FromStr>(word: &str) -> Result<T, Wrong> {
    word.parse()
        .map_err(|_| (word.to_owned(), format!("{word:?} is not a number")))
}

impl Kind {
    pub(super) fn parse(text: &str) -> Result<Self, Wrong> {
        let (name, room) = text
            .split_once(" room=")
            .map_or((text, None), |(name, room)| (name, Some(room)));
        let room = room.map(number).transpose()?;
        match (name, room) {
            ("plain", _) => Ok(Self::Plain { room }),
            ("services", _) => Ok(Self::Services { room }),
            ("external", _) => Ok(Self::External { room }),
            ("fast", None) => Ok(Self::Fast),
            _ => Err((name.to_owned(), format!("no fixture is called {text:?}"))),
        }
    }
}

impl Step {
    pub(super) fn parse(text: &str) -> Result<Self, Wrong> {
        let words: Vec<&str> = text.split_whitespace().collect();
        Ok(match words.as_slice() {
            ["come", "in", "by", device] => Self::ComeInBy((*device).to_owned()),
            [
                "host",
                "path",
                "carries",
                whose @ ("received" | "own"),
                "packets",
            ] => Self::HostPathCarriesReceived(*whose == "received"),
            ["node", "flags", names @ ..] => {
                Self::NodeFlags(flags(&names.join(" "), &NODE_FLAGS, "flag")?)
            }
            ["node", "has", "no", "address"] => Self::NodeHasNoAddress,
            ["pod", "addresses", nets @ ..] => {
                let net = |word: &&str| {
                    word.parse()
                        .map_err(|_| ((*word).to_owned(), format!("{word:?} is not a CIDR")))
                };
                Self::PodAddresses(nets.iter().map(net).collect::<Result<_, _>>()?)
            }
            ["ip", rest @ ..] => Self::Ip(rest.join(" ")),
            [
                "backend",
                "of",
                "udp",
                service,
                "moves",
                "from",
                old,
                "to",
                new,
            ] => {
                let (service, port) = service.split_once(':').unwrap_or((service, ""));
                let [service, old, new] = [service, old, new].map(str::to_owned);
                Self::BackendMoves {
                    service,
                    port: number(port)?,
                    old,
                    new,
                }
            }
            ["flood", "of", count, "openers"] => Self::Flood(number(count)?),
            ["forget", "flows"] => Self::ForgetFlows,
            ["agent", "tolerates", "flows"] => Self::MakeLiberal(true),
            ["agent", "tolerates", "no", "flows"] => Self::MakeLiberal(false),
            ["connections", "of", service, "to", backend, "end"] => {
                let [service, backend] = [service, backend].map(|end| (*end).to_owned());
                Self::ConnectionsEnd { service, backend }
            }
            ["silence", secs, "s"] => Self::Silence(number(secs)?),
            ["segments", "of", size, "bytes"] => Self::Segments(number(size)?),
            ["no", "segments"] => Self::Segments(0),
            ["frames", "are", "for", "another", "host"] => Self::FramesForOthers(true),
            ["frames", "are", "for", "this", "node"] => Self::FramesForOthers(false),
            [_, "is", ..] => Self::Devices(text.split("; ").map(device).collect::<Result<_, _>>()?),
            [first, ..] => {
                return Err((
                    (*first).to_owned(),
                    format!("no step begins with {first:?}"),
                ));
            }
            [] => return Err((String::new(), "a step has words".to_owned())),
        })
    }
}

/// Parses a device: `pod0 is unhooked`, or its flags.
fn device(text: &str) -> Result<(String, Option<Device>), Wrong> {
    let (name, is) = text
        .split_once(" is ")
        .ok_or_else(|| (text.to_owned(), "a device is something".to_owned()))?;
    if is == "unhooked" {
        return Ok((name.to_owned(), None));
    }
    let flags = flags(is, &DEVICE_FLAGS, "flag of a device")?;
    Ok((
        name.to_owned(),
        Some(Device::new(flags, Addr4::UNSPECIFIED, Addr6::UNSPECIFIED)),
    ))
}

/// Replaces names in braces by addresses.
pub fn with_addrs(text: &str, addr: impl Fn(&str) -> Result<IpAddr>) -> Result<String> {
    let mut parts = text.split('{');
    let mut replaced = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (name, rest) = part
            .split_once('}')
            .with_context(|| format!("an open brace in {text:?}"))?;
        replaced.push_str(&addr(name)?.to_string());
        replaced.push_str(rest);
    }
    Ok(replaced)
}
