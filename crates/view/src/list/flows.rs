//! The rows of `kpx flows`.

use comfy_table::Cell;

use super::Listed;
use crate::FlowView;
use crate::age::span;
use crate::flow_args::state_cell;
use crate::output::{Narrow, cell};

impl Listed for FlowView {
    const NARROW: Narrow<'static> = Narrow {
        optional: &["SOURCE", "PROTOCOL", "FRONTEND", "IDLE"],
        sentence: None,
    };

    fn header(wide: bool) -> Vec<&'static str> {
        let mut header = vec![
            "PROTOCOL", "CLIENT", "FRONTEND", "SERVICE", "BACKEND", "STATE", "IDLE", "SOURCE",
        ];
        if wide {
            header.extend(["EXPIRES", "FROM-NODE"]);
        }
        header
    }

    fn cells(&self, wide: bool) -> Vec<Cell> {
        // Shown only if the backend sees another source than the client's address.
        let source = if self.source == self.client {
            String::new()
        } else {
            self.source.to_string()
        };
        let mut row = vec![
            cell(&self.protocol),
            cell(self.client),
            cell(self.frontend),
            cell(self.service_name()),
            cell(self.backend),
            state_cell(self),
            cell(span(self.idle_secs.into())),
            cell(source),
        ];
        if wide {
            let expires = self.timeout_secs.saturating_sub(self.idle_secs);
            row.extend([
                cell(span(expires.into())),
                cell(if self.from_node { "yes" } else { "no" }),
            ]);
        }
        row
    }

    fn key(&self) -> String {
        format!(
            "{} {} {} {}",
            self.protocol, self.client, self.frontend, self.from_node
        )
    }

    fn name(&self) -> String {
        self.key()
    }
}
