//! The matches and targets of iptables inside nftables: `iptables-nft` sends them as the structures of old.

use super::attrs::Attrs;
use super::model::{Condition, Field, Part};
use super::packet::RTN_LOCAL;

/// The attributes of a match, which a target numbers alike.
const NFTA_MATCH_NAME: u16 = 1;
const NFTA_MATCH_REV: u16 = 2;
const NFTA_MATCH_INFO: u16 = 3;

/// The kinds of source and of destination, and the flags, in `struct xt_addrtype_info_v1`: only `--dst-type LOCAL` is
/// asked.
const LOCAL_DESTINATION: (u16, u16, u32) = (0, 1 << RTN_LOCAL, 0);

/// Returns the condition of a match, or None for one that always holds.
pub(super) fn matched(data: &Attrs) -> Option<Part> {
    let info = data.get(NFTA_MATCH_INFO).unwrap_or_default();
    let condition = match (data.text(NFTA_MATCH_NAME), data.u32(NFTA_MATCH_REV)) {
        (Some("comment"), _) => return None,
        (Some("mark"), Some(1)) => mark(info),
        (Some("addrtype"), Some(1)) => addr_type(info),
        _ => None,
    };
    Some(condition.map_or(Part::Maybe, Part::Condition))
}

/// Returns the effect of a target, or None for a harmless one.
pub(super) fn target(data: &Attrs) -> Option<Part> {
    let what = match data.text(NFTA_MATCH_NAME).unwrap_or("?") {
        "LOG" | "NFLOG" => return None,
        "MARK" => return Some(Part::SetMark),
        "MASQUERADE" => "masquerade".to_owned(),
        "SNAT" => "translate the source".to_owned(),
        "DNAT" => "translate the destination".to_owned(),
        "REDIRECT" => "redirect".to_owned(),
        other => format!("apply {other}"),
    };
    Some(Part::Change(what))
}

/// Reads `struct xt_mark_mtinfo1`: the mark, its mask, a byte for inversion.
fn mark(info: &[u8]) -> Option<Condition> {
    let (value, mask, inverted) = (info.get(..4)?, info.get(4..8)?, *info.get(8)?);
    Some(Condition { field: Field::Mark, mask: mask.to_vec(), value: value.to_vec(), equal: inverted == 0 })
}

/// Reads `struct xt_addrtype_info_v1`. Returns None unless it asks for a destination of the host.
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
