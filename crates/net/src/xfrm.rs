//! Lists the IPsec policies for packets that leave the host, through netlink (linux/xfrm.h).

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::{Context, Result};
use ipnet::IpNet;
use netlink_packet_core::{NLM_F_DUMP, NLM_F_REQUEST};
use rtnetlink::proto::ConnectionHandle;
use rtnetlink::sys::protocols::NETLINK_XFRM;

use super::netlink::{dumped, kernel};
use super::raw::{self, Asker, Message};

const XFRM_MSG_NEWPOLICY: u16 = 0x13;
const XFRM_MSG_GETPOLICY: u16 = 0x15;
/// The attributes with the policy's encryption templates and with its xfrm device.
const XFRMA_TMPL: u16 = 5;
const XFRMA_IF_ID: u16 = 31;

const XFRM_POLICY_OUT: u8 = 1;
const XFRM_POLICY_FWD: u8 = 2;
const XFRM_POLICY_BLOCK: u8 = 1;

/// The length of `struct xfrm_userpolicy_id`, the body of a request.
const ID_LEN: usize = 64;
/// The length of `struct xfrm_userpolicy_info`, and offsets in it. The selector is the first field.
const INFO_LEN: usize = 168;
const DST_AT: usize = 0;
const SRC_AT: usize = 16;
const FAMILY_AT: usize = 40;
const DST_PREFIX_AT: usize = 42;
const SRC_PREFIX_AT: usize = 43;
const DIR_AT: usize = 160;
const ACTION_AT: usize = 161;

const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;

/// A policy that encrypts or blocks packets that leave the host on any device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    src: IpNet,
    dst: IpNet,
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "src {} dst {}", self.src, self.dst)
    }
}

/// Lists this network namespace's policies for outgoing packets; empty if the kernel has no IPsec.
/// Requires CAP_NET_ADMIN.
pub async fn outgoing_policies() -> Result<Vec<Policy>> {
    policies(&mut open()?, &[XFRM_POLICY_OUT]).await
}

/// Lists the policies for forwarded packets, which have direction `fwd` or `out`.
pub async fn forwarding_policies() -> Result<Vec<Policy>> {
    forwarding_policies_by(&mut open()?).await
}

/// Lists the policies for forwarded packets through a persistent socket.
pub(crate) async fn forwarding_policies_by(socket: &mut Option<Asker>) -> Result<Vec<Policy>> {
    policies(socket, &[XFRM_POLICY_OUT, XFRM_POLICY_FWD]).await
}

/// Opens a socket for policy queries; `None` if the kernel has no IPsec.
pub(crate) fn open() -> Result<Option<Asker>> {
    match Asker::open(NETLINK_XFRM) {
        Err(error) if error.raw_os_error() == Some(nix::libc::EPROTONOSUPPORT) => Ok(None),
        opened => opened.map(Some).context("open a netlink socket for IPsec"),
    }
}

async fn policies(socket: &mut Option<Asker>, directions: &[u8]) -> Result<Vec<Policy>> {
    let Some(socket) = socket else {
        return Ok(Vec::new());
    };
    let list = async |handle: &ConnectionHandle<Message>| {
        let request = raw::request(
            XFRM_MSG_GETPOLICY,
            NLM_F_REQUEST | NLM_F_DUMP,
            vec![0; ID_LEN],
        );
        let answers = handle
            .clone()
            .request(request, kernel())
            .map_err(io::Error::other)?;
        let mut policies = Vec::new();
        dumped(answers, |message| {
            policies.extend(policy(&message, directions))
        })
        .await?;
        io::Result::Ok(policies)
    };
    socket.ask(list).await.context("list the IPsec policies")
}

/// Returns the policy in a message. Returns `None` for a policy of another direction, for a policy
/// that lets packets pass unchanged, and for the policy of an xfrm device, which only that device
/// applies.
fn policy(message: &Message, directions: &[u8]) -> Option<Policy> {
    let info = message
        .bytes
        .get(..INFO_LEN)
        .filter(|_| message.kind == XFRM_MSG_NEWPOLICY)?;
    let attributes = attributes(&message.bytes[INFO_LEN..]);
    let has = |kind: u16| attributes.iter().any(|(attribute, _)| *attribute == kind);
    let is_of_device = attributes
        .iter()
        .any(|(kind, value)| *kind == XFRMA_IF_ID && value.iter().any(|byte| *byte != 0));
    let changes = info[ACTION_AT] == XFRM_POLICY_BLOCK || has(XFRMA_TMPL);
    if !directions.contains(&info[DIR_AT]) || is_of_device || !changes {
        return None;
    }
    let family = u16::from_ne_bytes([info[FAMILY_AT], info[FAMILY_AT + 1]]);
    Some(Policy {
        src: net(family, &info[SRC_AT..], info[SRC_PREFIX_AT])?,
        dst: net(family, &info[DST_AT..], info[DST_PREFIX_AT])?,
    })
}

fn net(family: u16, addr: &[u8], prefix: u8) -> Option<IpNet> {
    let addr: IpAddr = match u8::try_from(family).ok()? {
        AF_INET => Ipv4Addr::from(<[u8; 4]>::try_from(addr.get(..4)?).ok()?).into(),
        AF_INET6 => Ipv6Addr::from(<[u8; 16]>::try_from(addr.get(..16)?).ok()?).into(),
        _ => return None,
    };
    IpNet::new(addr, prefix).ok()
}

/// Splits attributes: length, type, value, and padding to four bytes.
fn attributes(mut bytes: &[u8]) -> Vec<(u16, &[u8])> {
    let mut attributes = Vec::new();
    while let [len0, len1, kind0, kind1, ..] = *bytes {
        let len = usize::from(u16::from_ne_bytes([len0, len1]));
        let Some(value) = bytes.get(4..len) else {
            break;
        };
        attributes.push((u16::from_ne_bytes([kind0, kind1]), value));
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    attributes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a message of a little-endian kernel: selector, direction, action, attributes.
    fn message(selector: &str, [dir, action]: [u8; 2], attributes: &str) -> Message {
        let bytes = |hex: &str| -> Vec<u8> {
            (0..hex.len())
                .step_by(2)
                .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap())
                .collect()
        };
        let mut info = bytes(selector);
        info.resize(INFO_LEN, 0);
        (info[DIR_AT], info[ACTION_AT]) = (dir, action);
        info.extend(bytes(attributes));
        Message {
            kind: XFRM_MSG_NEWPOLICY,
            bytes: info,
        }
    }

    const TO_10_244_2: &str = "0af4020000000000000000000000000000000000000000000000000000000000000000000000000002001800000000000000000000000000";
    const TO_FD00_1: &str = "fd000001000000000000000000000000fd00000000000000000000000000000000000000000000000a004040000000000000000000000000";
    const TEMPLATE: &str = "44000500c000020200000000000000000000000000000000320000000200\
                            0000c00002010000000000000000000000000000000001000000ffffffffffffffffffffffff";
    const TYPE: &str = "0a0010000000000000000000";

    #[test]
    fn policies_that_change_outgoing_packets_are_found() {
        let encrypts = TEMPLATE.to_owned() + TYPE;
        let shown = |message| policy(&message, &[XFRM_POLICY_OUT]).map(|policy| policy.to_string());
        let to_10_244_2 = Some("src 0.0.0.0/0 dst 10.244.2.0/24".to_owned());
        assert_eq!(shown(message(TO_10_244_2, [1, 0], &encrypts)), to_10_244_2);
        assert_eq!(
            shown(message(TO_10_244_2, [1, 1], TYPE)),
            to_10_244_2,
            "it blocks"
        );
        assert_eq!(
            shown(message(TO_FD00_1, [1, 0], &encrypts)),
            Some("src fd00::/64 dst fd00:1::/64".to_owned())
        );
        assert_eq!(
            shown(message(TO_10_244_2, [1, 0], TYPE)),
            None,
            "it lets packets pass"
        );
        assert_eq!(
            shown(message(TO_10_244_2, [2, 0], &encrypts)),
            None,
            "it is for forwarded packets"
        );
        let of_device = encrypts + "08001f0007000000";
        assert_eq!(
            shown(message(TO_10_244_2, [1, 0], &of_device)),
            None,
            "it belongs to an xfrm device"
        );
    }

    #[test]
    fn a_short_message_is_no_policy() {
        let mut short = message(TO_10_244_2, [1, 1], TYPE);
        short.bytes.truncate(INFO_LEN - 1);
        assert_eq!(policy(&short, &[XFRM_POLICY_OUT]), None);
        let cut = message(TO_10_244_2, [1, 0], &TEMPLATE[..40]);
        assert_eq!(
            policy(&cut, &[XFRM_POLICY_OUT]),
            None,
            "its attribute says that it is longer"
        );
    }
}
