//! Formats the parsed rules as text, for reports from nodes without `nft`.

use std::fmt::Write as _;

use super::Netfilter;

use super::model::{Chain, Condition, Field, Part, Verdict};
use super::packet::Family;

impl Netfilter {
    /// Lists each chain with its rules, one per line, and the legacy tables that may have an
    /// effect.
    pub fn listing(&self) -> String {
        let mut text = String::new();
        for (name, chain) in &self.rules {
            text += &format!("{name}: {}\n", head(chain));
            for (number, rule) in (1..).zip(&chain.rules) {
                let parts: Vec<_> = rule.iter().map(part).collect();
                text += &format!("  {number}: {}\n", parts.join(" "));
            }
        }
        let legacy = [Family::V4, Family::V6]
            .into_iter()
            .flat_map(|family| self.legacy.obstacles(family, |_| true));
        legacy.for_each(|table| text += &format!("{table}\n"));
        text
    }
}

fn head(chain: &Chain) -> String {
    let Some(base) = &chain.base else {
        return "called by other chains".to_owned();
    };
    let mut text = format!("hook {:?}, priority {}", base.hook, base.priority).to_lowercase();
    for (is_so, word) in [(base.is_nat, ", nat"), (base.drops, ", policy drop")] {
        text += if is_so { word } else { "" };
    }
    if !chain.devices.is_empty() {
        text += &format!(", devices {}", chain.devices.join(","));
    }
    // The rules of tables without a chain for forwarded packets are not read, but counted.
    format!("{text}, {} rules", chain.uses)
}

fn part(part: &Part) -> String {
    match part {
        Part::Condition(condition) => condition_text(condition),
        Part::Maybe => "(a condition that kpx does not read)".to_owned(),
        Part::Sender { spoofed: true } => "fib source unknown".to_owned(),
        Part::Sender { spoofed: false } => "fib source known or unknown".to_owned(),
        Part::SetMark(Some(change)) => {
            format!("mark set to mark & {:#x} ^ {:#x}", change.keep, change.flip)
        }
        Part::SetMark(None) => "mark set to a value that kpx cannot derive".to_owned(),
        Part::Change(what) | Part::Refuse(what) => what.clone(),
        Part::Verdict(Verdict::Accept) => "accept".to_owned(),
        Part::Verdict(Verdict::Return) => "return".to_owned(),
        Part::Verdict(Verdict::Break) => "next rule".to_owned(),
        Part::Verdict(Verdict::Jump(chain)) => format!("jump {chain}"),
        Part::Verdict(Verdict::Goto(chain)) => format!("goto {chain}"),
    }
}

fn condition_text(
    Condition {
        field,
        mask,
        value,
        equal,
    }: &Condition,
) -> String {
    let sign = if *equal { "==" } else { "!=" };
    if let Field::InName | Field::OutName = field {
        let name = String::from_utf8_lossy(value)
            .trim_end_matches('\0')
            .to_owned();
        return format!(
            "{} {sign} {name:?}",
            if *field == Field::InName {
                "iifname"
            } else {
                "oifname"
            }
        );
    }
    let name = match field {
        Field::Header(offset) => format!("header@{offset}"),
        Field::Mark => "mark".to_owned(),
        Field::NfProto => "nfproto".to_owned(),
        Field::Protocol => "protocol".to_owned(),
        Field::L4Proto => "l4proto".to_owned(),
        Field::DestinationKind => "fib daddr type".to_owned(),
        Field::State => "ct state".to_owned(),
        Field::InName | Field::OutName => String::new(),
    };
    let mask = if mask.iter().all(|byte| *byte == 0xff) {
        String::new()
    } else {
        format!(" & {}", hex(mask))
    };
    format!("{name}{mask} {sign} {}", hex(value))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold("0x".to_owned(), |mut text, byte| {
        let _written = write!(text, "{byte:02x}");
        text
    })
}
