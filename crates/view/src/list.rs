//! Prints lists of objects as tables, data or names, and their changes with `--watch`.

mod backends;
mod events;
mod flows;
mod services;

pub use backends::{BackendOrder, BackendRow};
pub use services::port;

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use comfy_table::Cell;
use jiff::Timestamp;
use serde::Serialize;

use crate::client::{Client, WAITS};
use crate::output::{
    Form, Kind, Narrow, cell, escaped_json, json, or_nothing, print, print_on, say, yaml, yellow,
};

/// Time between two reads of the objects.
const PERIOD: Duration = Duration::from_secs(2);
/// The columns that change with the time alone.
const CLOCKS: &[&str] = &["AGE", "IDLE", "EXPIRES", "FIRST-SEEN", "LAST-SEEN"];
/// The last cell of a removed object.
const GONE: &str = "gone";

#[derive(Args, Debug)]
pub struct WatchArgs {
    /// After the list, print each new, changed or removed object, until stopped; polls every 2 s.
    #[arg(long, short)]
    watch: bool,
}

pub trait Listed: Serialize {
    /// True if the removal of an object is printed.
    const TELLS_GONE: bool = true;
    /// The columns whose change alone is not printed.
    const NO_NEWS: &'static [&'static str] = CLOCKS;
    /// The columns that shrink or are omitted on a narrow terminal.
    const NARROW: Narrow<'static> = Narrow {
        optional: &[],
        sentence: None,
    };

    fn header(wide: bool) -> Vec<&'static str>;
    fn cells(&self, wide: bool) -> Vec<Cell>;
    /// Returns the last column's cell: the path to the backend in host mode. The column is omitted
    /// if no object has a path.
    fn way(&self) -> Option<Cell> {
        None
    }
    /// Returns the time by which objects of several nodes are sorted; `None` to sort by node.
    fn time(&self) -> Option<Timestamp> {
        None
    }
    /// Returns the key that identifies the object in the next read.
    fn key(&self) -> String;
    /// Returns the object's name as other commands accept it.
    fn name(&self) -> String;
}

/// Prints the objects that `read` returns, and their changes with `--watch`. The first call of
/// `read` gets true. `nothing` is the message for an empty list.
pub async fn show<T: Listed>(
    client: &Client,
    kind: Kind,
    watch: &WatchArgs,
    nothing: &str,
    mut read: impl AsyncFnMut(bool) -> Result<Vec<T>>,
) -> Result<()> {
    let items = read(true).await?;
    let waits = items.is_empty() && client.waits().await;
    if waits {
        say(format_args!("nothing found yet: {WAITS}"));
    }
    let nothing = (!waits).then_some(nothing);
    go_on(items, nothing, kind, watch.watch.then_some(PERIOD), read).await
}

/// Prints the objects and their changes. Reads them again after each period.
pub async fn follow<T: Listed>(
    kind: Kind,
    period: Duration,
    mut read: impl AsyncFnMut(bool) -> Result<Vec<T>>,
) -> Result<()> {
    let items = read(true).await?;
    go_on(items, None, kind, Some(period), read).await
}

/// Prints the objects, and their changes after each `period`. `nothing` is the message for an empty
/// list.
async fn go_on<T: Listed>(
    items: Vec<T>,
    nothing: Option<&str>,
    kind: Kind,
    period: Option<Duration>,
    mut read: impl AsyncFnMut(bool) -> Result<Vec<T>>,
) -> Result<()> {
    let Some(period) = period else {
        return print(&match kind {
            Kind::Table(form) => match nothing {
                Some(nothing) => or_nothing(table(&items, form), nothing),
                None => table(&items, form),
            },
            Kind::Json => json(&items)?,
            Kind::Yaml => yaml(&items)?,
            Kind::Names => names(&items),
        });
    };
    let mut seen = Seen::default();
    let mut columns = None;
    let mut news = seen.news(items);
    loop {
        if !print_on(&news.text(kind, &mut columns)?)? {
            return Ok(());
        }
        tokio::time::sleep(period).await;
        news = seen.news(read(false).await?);
    }
}

fn table<T: Listed>(items: &[T], form: Form) -> String {
    let has_ways = have_ways(items);
    form.narrowed(
        &header::<T>(form.wide, has_ways),
        T::NARROW,
        items.iter().map(|item| row(item, form.wide, has_ways)),
    )
}

fn have_ways<T: Listed>(items: &[T]) -> bool {
    items.iter().any(|item| item.way().is_some())
}

fn header<T: Listed>(wide: bool, has_ways: bool) -> Vec<&'static str> {
    T::header(wide)
        .into_iter()
        .chain(has_ways.then_some("WAY"))
        .collect()
}

fn row<T: Listed>(item: &T, wide: bool, has_ways: bool) -> Vec<Cell> {
    let way = has_ways.then(|| item.way().unwrap_or_else(|| cell("")));
    item.cells(wide).into_iter().chain(way).collect()
}

fn names<T: Listed>(items: &[T]) -> String {
    let mut names: Vec<_> = items.iter().map(|item| item.name() + "\n").collect();
    names.dedup();
    names.concat()
}

/// The last read: the cells by key, without [`CLOCKS`].
#[derive(Debug, Default)]
struct Seen(BTreeMap<String, (String, Vec<Cell>)>);

/// The current objects and their changes.
struct News<T> {
    items: Vec<T>,
    /// The indices of changed objects in `items`.
    changed: Vec<usize>,
    gone: Vec<Vec<Cell>>,
}

impl Seen {
    fn news<T: Listed>(&mut self, items: Vec<T>) -> News<T> {
        let mut before = std::mem::take(&mut self.0);
        let mut changed = Vec::new();
        for (place, item) in items.iter().enumerate() {
            let key = item.key();
            let cells = row(item, true, true);
            let shown = header::<T>(true, true)
                .into_iter()
                .zip(&cells)
                .filter(|(column, _)| !T::NO_NEWS.contains(column));
            let shown: String = shown.map(|(_, cell)| cell.content() + "\u{1f}").collect();
            if before
                .remove(&key)
                .is_none_or(|(before, _)| before != shown)
            {
                changed.push(place);
            }
            self.0.insert(key, (shown, cells));
        }
        let gone = before
            .into_values()
            .filter(|_| T::TELLS_GONE)
            .map(|(_, cells)| cells)
            .collect();
        News {
            items,
            changed,
            gone,
        }
    }
}

impl<T: Listed> News<T> {
    /// Formats the changes: table rows, a line of JSON or a YAML document per object, or names.
    /// `columns` holds the header that was printed last.
    fn text(&self, kind: Kind, columns: &mut Option<String>) -> Result<String> {
        let changed = || {
            self.changed
                .iter()
                .filter_map(|place| self.items.get(*place))
        };
        Ok(match kind {
            Kind::Table(form) => self.rows(form, columns),
            Kind::Json => {
                let lines =
                    changed().map(|item| Ok(escaped_json(&serde_json::to_string(item)?) + "\n"));
                lines.collect::<Result<String>>()?
            }
            Kind::Yaml => {
                let documents = changed().map(|item| Ok(format!("---\n{}", yaml(item)?)));
                documents.collect::<Result<String>>()?
            }
            Kind::Names => changed().map(|item| item.name() + "\n").collect(),
        })
    }

    /// Formats the changed rows. All rows count for the widths, so that new rows align with old
    /// rows. A changed set of columns prints its header.
    fn rows(&self, form: Form, columns: &mut Option<String>) -> String {
        let has_ways = have_ways(&self.items);
        let header = header::<T>(form.wide, has_ways);
        let gone = self.gone.iter().map(|cells| {
            let mut cells: Vec<_> = cells.iter().take(header.len()).cloned().collect();
            if let Some(last) = cells.last_mut() {
                *last = yellow(GONE);
            }
            cells
        });
        let rows = self
            .items
            .iter()
            .map(|item| row(item, form.wide, has_ways))
            .chain(gone);
        let all = Form {
            headers: true,
            one_line: true,
            ..form
        }
        .narrowed(&header, T::NARROW, rows);
        if self.changed.is_empty() && self.gone.is_empty() {
            return String::new();
        }
        let names = all.lines().next().unwrap_or_default();
        let names = names.split_whitespace().collect::<Vec<_>>().join(" ");
        let is_named = columns.replace(names.clone()) == Some(names);
        let is_shown = |line: usize| match line.checked_sub(1) {
            None => form.headers && !is_named,
            Some(place) => place >= self.items.len() || self.changed.contains(&place),
        };
        all.lines()
            .enumerate()
            .filter(|(line, _)| is_shown(*line))
            .map(|(_, line)| format!("{line}\n"))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Serialize)]
    struct Pod(&'static str, u64, u64);

    impl Listed for Pod {
        fn header(_wide: bool) -> Vec<&'static str> {
            vec!["NAME", "FLOWS", "AGE"]
        }

        fn cells(&self, _wide: bool) -> Vec<Cell> {
            vec![cell(self.0), cell(self.1), cell(self.2)]
        }

        fn key(&self) -> String {
            self.0.to_owned()
        }

        fn name(&self) -> String {
            format!("pod/{}", self.0)
        }
    }

    #[test]
    fn changes_are_rows_below_the_list_and_clocks_are_none() {
        let form = Form {
            headers: true,
            ..Form::default()
        };
        let mut seen = Seen::default();
        let mut columns = None;
        let mut reported = |pods: &[Pod]| {
            seen.news(pods.to_vec())
                .text(Kind::Table(form), &mut columns)
                .unwrap()
        };
        let list = "NAME       FLOWS   AGE\na-longer   1       10\nb          2       20\n";
        assert_eq!(reported(&[Pod("a-longer", 1, 10), Pod("b", 2, 20)]), list);
        assert_eq!(reported(&[Pod("a-longer", 1, 12), Pod("b", 2, 22)]), "");
        let one = "b          3       24\n";
        assert_eq!(reported(&[Pod("a-longer", 1, 14), Pod("b", 3, 24)]), one);
        assert_eq!(
            reported(&[Pod("b", 3, 26), Pod("c", 0, 0)]),
            "c          0       0\na-longer   1       gone\n"
        );
    }

    #[test]
    fn data_of_changes_is_one_document_for_each_object() {
        let mut seen = Seen::default();
        seen.news(vec![Pod("a", 1, 1), Pod("b", 1, 1)]);
        let news = seen.news(vec![Pod("a", 1, 2), Pod("b", 2, 2)]);
        assert_eq!(news.text(Kind::Json, &mut None).unwrap(), "[\"b\",2,2]\n");
        assert_eq!(
            news.text(Kind::Yaml, &mut None).unwrap(),
            "---\n- b\n- 2\n- 2\n"
        );
        assert_eq!(news.text(Kind::Names, &mut None).unwrap(), "pod/b\n");
        assert_eq!(names(&news.items), "pod/a\npod/b\n");
    }
}
