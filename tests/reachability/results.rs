//! The results of all cases. A run continues after a failure.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::{Result, bail};
use comfy_table::Table;
use comfy_table::presets::UTF8_FULL_CONDENSED;

use super::table::{ABOUT, NOT_RUN};

#[derive(Default)]
pub(crate) struct Results {
    /// By case: rows that passed, rows in total.
    cases: BTreeMap<&'static str, (u32, u32)>,
    failures: Vec<String>,
}

impl Results {
    pub(crate) fn add(&mut self, case: &'static str, row: &str, result: Result<()>) {
        let (passed, all) = self.cases.entry(case).or_default();
        *all += 1;
        match result {
            Ok(()) => *passed += 1,
            Err(error) => self.failures.push(format!("{row}: {error:#}")),
        }
    }

    pub(crate) fn has_failures(&self) -> bool {
        !self.failures.is_empty()
    }

    pub(crate) fn into_result(self) -> Result<()> {
        if self.failures.is_empty() {
            return Ok(());
        }
        let all: u32 = self.cases.values().map(|(_, all)| all).sum();
        bail!(
            "{} of {all} rows failed:\n{}\n{self}",
            self.failures.len(),
            self.failures.join("\n")
        )
    }
}

impl fmt::Display for Results {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new();
        table
            .load_style(UTF8_FULL_CONDENSED)
            .set_header(["case", "what", "passed", "rows"]);
        for (case, (passed, all)) in &self.cases {
            let what = ABOUT
                .iter()
                .find(|(id, _)| id == case)
                .map_or("", |(_, what)| what);
            table.add_row([
                (*case).to_owned(),
                what.to_owned(),
                passed.to_string(),
                all.to_string(),
            ]);
        }
        for (case, why) in NOT_RUN {
            table.add_row([case, why, "", ""]);
        }
        table.fmt(f)
    }
}
