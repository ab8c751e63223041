//! Parses iptables' matches and targets in nftables rules: `iptables-nft` sends them as the legacy
//! structures.

use super::attrs::Attrs;
use super::model::{Condition, Field, MarkChange, Part};
use super::packet::RTN_LOCAL;

/// The attributes of a match, and of a target.
const NFTA_MATCH_NAME: u16 = 1;
const NFTA_MATCH_REV: u16 = 2;
const NFTA_MATCH_INFO: u16 = 3;

/// The source types, destination types and flags of `struct xt_addrtype_info_v1` for the sole
/// condition `--dst-type LOCAL`.
const LOCAL_DESTINATION: (u16, u16, u32) = (0, 1 << RTN_LOCAL, 0);

/// The offsets of the state mask and the flags in `struct xt_conntrack_mtinfo2` and
/// `xt_conntrack_mtinfo3`. The flags select the compared fields and invert them.
const STATES_AT: usize = 150;
const FLAGS_AT: usize = 146;
const XT_CONNTRACK_STATE: u16 = 1;
/// A flag that only records the name under which iptables requested the match.
const XT_CONNTRACK_STATE_ALIAS: u16 = 1 << 13;
/// Extra bits of any state: translated source or destination.
const TRANSLATED: u32 = 0xc0;

/// The flag of `struct xt_rpfilter_info` that inverts the match.
const XT_RPFILTER_INVERT: u8 = 1 << 3;

/// The matches whose only effects are on their own counters and limits, each between blanks.
const ASKING: &str = " addrtype cgroup connbytes connlimit connmark conntrack cpu devgroup dscp ecn esp frag hashlimit helper hl \
    icmp icmp6 iprange length limit mac mark multiport nfacct owner physdev pkttype policy quota realm rpfilter sctp set \
    socket state statistic string tcp tcpmss time tos ttl u32 udp ";

/// Returns the conditions of a match; empty if the match always holds. A match that kpx does not
/// support may have an effect.
pub(super) fn matched(data: &Attrs) -> Vec<Part> {
    let info = data.get(NFTA_MATCH_INFO).unwrap_or_default();
    let name = data.text(NFTA_MATCH_NAME).unwrap_or("?");
    let condition = match (name, data.u32(NFTA_MATCH_REV)) {
        ("comment", _) => return Vec::new(),
        ("rpfilter", Some(0)) => {
            let spoofed = |flags: &u8| Part::Sender {
                spoofed: flags & XT_RPFILTER_INVERT != 0,
            };
            return vec![info.first().map_or(Part::Maybe, spoofed)];
        }
        ("mark", Some(1)) => mark(info),
        ("addrtype", Some(1)) => addr_type(info),
        ("conntrack" | "state", Some(2 | 3)) => conntrack(info),
        ("state", Some(0)) => info
            .get(..4)
            .and_then(|states| state(u32::from_ne_bytes(states.try_into().ok()?), false)),
        _ => None,
    };
    let unknown = (!ASKING.contains(&format!(" {name} ")))
        .then(|| Part::Change(format!("be noted by match {name}")));
    unknown
        .into_iter()
        .chain([condition.map_or(Part::Maybe, Part::Condition)])
        .collect()
}

pub(super) fn target(data: &Attrs) -> Part {
    let what = match data.text(NFTA_MATCH_NAME).unwrap_or("?") {
        "MARK" => return Part::SetMark(set_mark(data)),
        "REJECT" => return Part::Refuse("reject the packet".to_owned()),
        "DROP" => return Part::Refuse("drop the packet".to_owned()),
        "NFQUEUE" => return Part::Refuse("hand the packet to a program".to_owned()),
        "LOG" | "NFLOG" => "log the packet".to_owned(),
        "MASQUERADE" => "masquerade".to_owned(),
        "SNAT" => "translate the source".to_owned(),
        "DNAT" => "translate the destination".to_owned(),
        "REDIRECT" => "redirect".to_owned(),
        other => format!("apply {other}"),
    };
    Part::Change(what)
}

/// Reads `struct xt_mark_tginfo2`: the bits to flip, and the mask of the bits cleared first.
fn set_mark(data: &Attrs) -> Option<MarkChange> {
    let info = data
        .get(NFTA_MATCH_INFO)
        .filter(|_| data.u32(NFTA_MATCH_REV) == Some(2))?;
    let bits = |at: usize| Some(u32::from_ne_bytes(info.get(at..at + 4)?.try_into().ok()?));
    Some(MarkChange {
        keep: !bits(4)?,
        flip: bits(0)?,
    })
}

/// Reads `struct xt_mark_mtinfo1`: mark, mask, inversion byte.
fn mark(info: &[u8]) -> Option<Condition> {
    let value = info.get(..4)?;
    let mask = info.get(4..8)?;
    let inverted = *info.get(8)?;
    Some(Condition {
        field: Field::Mark,
        mask: mask.to_vec(),
        value: value.to_vec(),
        equal: inverted == 0,
    })
}

/// Returns the condition on the states; `None` if the match compares other fields too.
fn conntrack(info: &[u8]) -> Option<Condition> {
    let u16_at = |at: usize| Some(u16::from_ne_bytes(info.get(at..at + 2)?.try_into().ok()?));
    let asks = u16_at(FLAGS_AT)?;
    let inverts = u16_at(FLAGS_AT + 2)?;
    let is_inverted = inverts & XT_CONNTRACK_STATE != 0;
    (asks & !XT_CONNTRACK_STATE_ALIAS == XT_CONNTRACK_STATE)
        .then(|| state(u32::from(u16_at(STATES_AT)?), is_inverted))?
}

/// Returns the condition that the connection has one of these states, or none of them if
/// `is_inverted`.
fn state(states: u32, is_inverted: bool) -> Option<Condition> {
    (states & TRANSLATED == 0).then(|| Condition {
        field: Field::State,
        mask: states.to_ne_bytes().to_vec(),
        value: vec![0; size_of_val(&states)],
        equal: is_inverted,
    })
}

/// Reads `struct xt_addrtype_info_v1`. Returns `None` unless it matches only local destinations.
fn addr_type(info: &[u8]) -> Option<Condition> {
    let kinds = |at: usize| Some(u16::from_ne_bytes(info.get(at..at + 2)?.try_into().ok()?));
    let flags = u32::from_ne_bytes(info.get(4..8)?.try_into().ok()?);
    ((kinds(0)?, kinds(2)?, flags) == LOCAL_DESTINATION).then(|| Condition {
        field: Field::DestinationKind,
        mask: vec![0xff; size_of_val(&RTN_LOCAL)],
        value: RTN_LOCAL.to_ne_bytes().to_vec(),
        equal: true,
    })
}
