//! The rows of `kpx events`.

use comfy_table::Cell;
use jiff::Timestamp;

use super::Listed;
use crate::output::{Narrow, cell, yellow};
use crate::{EventView, age};

impl Listed for EventView {
    /// The agent evicts old entries.
    const TELLS_GONE: bool = false;
    const NARROW: Narrow<'static> = Narrow {
        optional: &["COUNT", "TYPE", "REASON"],
        sentence: Some("NOTE"),
    };

    fn header(wide: bool) -> Vec<&'static str> {
        let header = vec!["LAST-SEEN", "TYPE", "REASON", "OBJECT", "COUNT", "NOTE"];
        if wide {
            [vec!["FIRST-SEEN"], header].concat()
        } else {
            header
        }
    }

    fn cells(&self, wide: bool) -> Vec<Cell> {
        let kind = if self.r#type == "Warning" {
            yellow(&self.r#type)
        } else {
            cell(&self.r#type)
        };
        let first = wide.then(|| cell(age::since(self.first_seen)));
        let last = cell(age::since(self.last_seen));
        let row = [
            last,
            kind,
            cell(&self.reason),
            cell(self.object()),
            cell(self.count),
            cell(&self.note),
        ];
        first.into_iter().chain(row).collect()
    }

    fn time(&self) -> Option<Timestamp> {
        Some(self.last_seen)
    }

    /// Returns the fields that identify an entry in the agent.
    fn key(&self) -> String {
        format!(
            "{} {} {} {} {}",
            self.reason,
            self.object(),
            self.r#type,
            self.services.join(","),
            self.note
        )
    }

    fn name(&self) -> String {
        self.object()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Two entries with the same key would make `-w` print both at each read.
    #[test]
    fn entries_about_different_services_have_different_keys() {
        let about = |service: &str| -> EventView {
            let time = "2026-01-02T03:04:05Z";
            let event = json!({
                "firstSeen": time, "lastSeen": time, "count": 1, "type": "Warning", "reason": "InvalidField", "kind": "LocalRedirect",
                "namespace": "shop", "name": "cache", "note": "no port is listed", "services": [service],
            });
            serde_json::from_value(event).unwrap()
        };
        assert_eq!(about("shop/web").key(), about("shop/web").key());
        assert_ne!(about("shop/web").key(), about("shop/dns").key());
    }
}
