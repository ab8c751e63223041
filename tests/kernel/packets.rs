//! Runs the packet rows of `rows/*.packets`; `rows/README.md` describes the format.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use testbed::rows::Outcome;
use testbed::rows::parse::{Item, Row, Section, aligned, sections};
use testbed::rows::step::{Kind, Step};
use testbed::rows::update::{self, is_updating};

use crate::fast_fixture::FastFixture;
use crate::fixture::{Fixture, fixtures_of, fixtures_with_room};
use crate::policy::{external_with_room, services_with_room};
use crate::reuse::Setup;

/// A file of rows, and the Rust file of the tests that run them.
pub(crate) struct File {
    name: &'static str,
    rows: &'static str,
    tests: &'static str,
}

macro_rules! files {
    ($($name:ident)*) => {
        const FILES: &[File] = &[$(File {
            name: stringify!($name),
            rows: include_str!(concat!("rows/", stringify!($name), ".packets")),
            tests: include_str!(concat!(stringify!($name), ".rs")),
        }),*];
    };
}

files! {
    bypass counts ends fast flows foreign_nat forgery fragments half_open handover icmp limits lost meetings monitor opened options policy sctp shares silent
    stack verdicts
}

/// Makes a test of each named section. The sections name their fixtures.
macro_rules! packet_tests {
    ($file:ident: $($section:ident,)*) => {
        $(
            #[test]
            fn $section() -> anyhow::Result<()> {
                crate::packets::run(stringify!($file), stringify!($section))
            }
        )*
    };
}
pub(crate) use packet_tests;

/// A fixture that runs rows and steps.
pub(crate) trait Runner {
    fn fixture(&mut self) -> &mut Fixture;
    /// Runs a row's packet. If the output packet is as expected, the outcome has the row's own
    /// text.
    fn outcome(&mut self, row: &Row) -> Result<Outcome>;
    fn step(&mut self, step: &Step) -> Result<()>;
}

/// Runs a section in its own fixtures, for both families.
pub(crate) fn run(file: &str, section: &str) -> Result<()> {
    let section = find_section(file, section)?;
    for (kind, items) in section.parts()? {
        match kind {
            Kind::Plain { room } => run_in(fixtures_with_room("rows", room)?, items),
            Kind::Services { room } => run_in(services_with_room(room)?, items),
            Kind::External { room } => run_in(external_with_room(room)?, items),
            Kind::Fast => run_in(FastFixture::both()?, items),
        }?;
    }
    Ok(())
}

/// Runs a section of plain fixtures in fixtures with this set-up.
pub(crate) fn run_with(setup: Setup, file: &str, section: &str) -> Result<()> {
    for (_, items) in find_section(file, section)?.parts()? {
        run_in(fixtures_of("rows", setup)?, items)?;
    }
    Ok(())
}

fn run_in<R: Runner>(runners: Vec<R>, items: &[Item]) -> Result<()> {
    runners
        .into_iter()
        .try_for_each(|mut runner| run_items(&mut runner, items))
}

/// Runs a section, such as `flows::closed_flow_gives_its_port_back`, in the test's fixture.
pub(crate) fn run_section(runner: &mut impl Runner, name: &str) -> Result<()> {
    let (file, section) = name
        .split_once("::")
        .with_context(|| format!("section {name} names no file"))?;
    run_items(runner, &find_section(file, section)?.items)
}

/// Returns the rows of a section that the test runs itself.
pub(crate) fn rows_of(name: &str) -> Result<Vec<Row>> {
    let (file, section) = name
        .split_once("::")
        .with_context(|| format!("section {name} names no file"))?;
    let items = find_section(file, section)?.items.into_iter();
    items
        .map(|item| match item {
            Item::Row(row) => Ok(row),
            _ => bail!("section {name} has more than rows"),
        })
        .collect()
}

fn run_items<R: Runner>(runner: &mut R, items: &[Item]) -> Result<()> {
    let is_v4 = runner.fixture().is_v4();
    let mut is_meant = true;
    for item in items {
        match item {
            Item::Only(only) => is_meant = only.is_none_or(|only_v4| only_v4 == is_v4),
            _ if !is_meant => {}
            Item::Row(row) => run_row(runner, row)?,
            Item::Step { place, step } => {
                runner.step(step).with_context(|| place.clone())?;
                // The step may have changed a route or a device; the agent would begin an epoch.
                runner.fixture().bench.datapath.ways.begin_epoch()?;
            }
            Item::Rows { place, section } => {
                run_section(runner, section).with_context(|| place.clone())?
            }
            Item::Fixture { place, .. } => {
                bail!("{place}: a test has made the fixture of this section")
            }
        }
    }
    Ok(())
}

fn run_row(runner: &mut impl Runner, row: &Row) -> Result<()> {
    let family = if runner.fixture().is_v4() {
        "IPv4"
    } else {
        "IPv6"
    };
    let mut outcome = runner
        .outcome(row)
        .with_context(|| format!("{}: {row} over {family}", row.place))?;
    if is_updating() {
        outcome.out = runner.fixture().name_drawn_ports(&outcome.out)?;
        return update::record(row, &row.with(&outcome)).with_context(|| row.place.clone());
    }
    let found = row.with(&outcome);
    ensure!(
        *row == found,
        "{}: wrong row over {family} (UPDATE_EXPECT=1 rewrites it)\n  written: {row}\n    found: {found}",
        row.place
    );
    Ok(())
}

/// Returns the path of a file of rows, relative to the workspace.
fn path_of(name: &str) -> String {
    Path::new(file!())
        .with_file_name("rows")
        .join(name)
        .with_extension("packets")
        .display()
        .to_string()
}

fn sections_of(file: &str) -> Result<Vec<Section>> {
    let found = FILES.iter().find(|known| known.name == file);
    sections(
        &path_of(file),
        found
            .with_context(|| format!("no file of rows is called {file}"))?
            .rows,
    )
}

fn find_section(file: &str, name: &str) -> Result<Section> {
    let section = sections_of(file)?
        .into_iter()
        .find(|section| section.name == name);
    section.with_context(|| format!("{} has no section {name}", path_of(file)))
}

#[test]
fn every_section_is_run_by_a_test() -> Result<()> {
    for file in FILES {
        let generated = file
            .tests
            .split("packet_tests! {")
            .skip(1)
            .filter_map(|list| list.split('}').next());
        let generated: Vec<&str> = generated
            .flat_map(|list| list.split([',', ':', ' ', '\n']))
            .collect();
        for section in sections_of(file.name)? {
            let name = format!("{}::{}", file.name, section.name);
            let is_rust = FILES
                .iter()
                .any(|file| file.tests.contains(&format!("\"{name}\"")));
            let is_included = FILES.iter().any(|file| {
                file.rows
                    .lines()
                    .any(|line| line == format!("* rows {name}"))
            });
            ensure!(
                is_rust || is_included || generated.contains(&section.name.as_str()),
                "{}: no test runs section {}",
                section.place,
                section.name
            );
        }
    }
    Ok(())
}

#[test]
fn rows_are_aligned() -> Result<()> {
    FILES.iter().try_for_each(|file| {
        let aligned = aligned(&path_of(file.name), file.rows)?;
        if is_updating() {
            return update::align(&path_of(file.name));
        }
        let is_wrong = |(line, aligned): &(&str, &str)| line != aligned;
        let wrong = file
            .rows
            .lines()
            .zip(aligned.lines())
            .position(|lines| is_wrong(&lines));
        match wrong {
            Some(index) => {
                bail!(
                    "{}:{}: not aligned (UPDATE_EXPECT=1 aligns it)",
                    path_of(file.name),
                    index + 1
                )
            }
            None => Ok(()),
        }
    })
}

#[test]
fn errors_have_line_and_column() {
    let cases = [
        (
            "== a\ningress | tcp | pass | same",
            "2:28: a row has 5 columns: hook, packet in, verdict, packet out, counters",
        ),
        (
            "== a\n\nindoors | tcp | pass | same | -",
            "3:1: no hook is called \"indoors\"",
        ),
        (
            "== a\nlo  | tcp | perhaps | same | -",
            "2:13: no verdict is called \"perhaps\"",
        ),
        (
            "== a\nlo | tcp | pass | same | forwarded flown",
            "2:36: no counter is called \"flown\"",
        ),
        (
            "lo | tcp | pass | same | -",
            "1:1: the line belongs to no section",
        ),
        ("== a\n* fly", "2:3: no step begins with \"fly\""),
        (
            "== a\n* node flags dull",
            "2:14: no flag is called \"dull\"",
        ),
        ("== a\nfixture grand", "2:9: no fixture is called \"grand\""),
        ("== a\n== a", "2:4: section a is there twice"),
        (
            "== a\n* lo is pod round",
            "2:13: no flag of a device is called \"round\"",
        ),
    ];
    for (text, error) in cases {
        let found = sections(&path_of("x"), text).expect_err(text).to_string();
        let want = format!("{}:{error}", path_of("x"));
        assert_eq!(found, want);
    }
}
