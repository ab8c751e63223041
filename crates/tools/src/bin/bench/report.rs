//! Makes of results what is read: the figures of docs/performance.md, docs/scale.md,
//! docs/host-mode.md and docs/backend-health.md, between markers, and the drawings beside them.

pub(crate) mod dead;
mod fan;
mod figures;
mod goals;
mod icount;
mod overview;
mod plots;
mod runs;
mod scale;
mod scale_plots;
pub(crate) mod ways;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use tools::bench::{Key, Sample, Summary, summarise};

use crate::record::{self, Record};

#[derive(clap::Parser)]
pub(crate) struct Args {
    /// The folder of the document
    #[arg(long, env = "KPX_BENCH_DOCS", default_value = "docs")]
    docs: PathBuf,
}

/// The kernels of virtual machines that docs/scale.md has tables of.
const KERNELS: [&str; 3] = ["6.1", "6.12", "newest"];

/// Cells and what all rounds of them say.
type Cells = BTreeMap<Key, Summary>;

pub(crate) fn run(args: &Args, results: &Path) -> Result<()> {
    let document = args.docs.join("performance.md");
    let before =
        fs::read_to_string(&document).with_context(|| format!("read {}", document.display()))?;
    let mut text = before;
    let data = read(results, "data");
    if !data.is_empty() {
        let samples: Vec<Sample> = data.iter().filter_map(sample).collect();
        let cells = summarise(&samples);
        text = replace(&text, "data: overview", &overview::text(&data, &cells))?;
        text = replace(&text, "data: goals", &goals::table(&cells))?;
        text = replace(&text, "data: counted", &figures::counted(&cells))?;
        text = replace(&text, "data: cells", &figures::cells(&cells))?;
        text = replace(&text, "data: not run", &figures::skipped(&data))?;
        let drawn = plots::draw(&cells, &args.docs.join("performance"))?;
        text = replace(&text, "data: drawings", &figures::drawings(&drawn))?;
    }
    for section in ["programs", "openers", "control"] {
        let records = read(results, section);
        if !records.is_empty() {
            text = replace(&text, section, &figures::tables(&records))?;
        }
    }
    let counted = read(results, "icount");
    if !counted.is_empty() {
        text = replace(&text, "icount", &icount::tables(&counted))?;
    }
    fs::write(&document, text).with_context(|| format!("write {}", document.display()))?;
    large_clusters(&args.docs, results)?;
    other_kernels(&args.docs, results)?;
    one_table(
        &args.docs.join("host-mode.md"),
        results,
        "tunnel",
        ways::text,
    )?;
    one_table(
        &args.docs.join("backend-health.md"),
        results,
        "dead-backends",
        dead::text,
    )
}

/// Writes the table of a section into its document, if the section was run.
fn one_table(
    document: &Path,
    results: &Path,
    section: &str,
    table: fn(&[Record]) -> String,
) -> Result<()> {
    let records = read(results, section);
    if records.is_empty() {
        return Ok(());
    }
    let text =
        fs::read_to_string(document).with_context(|| format!("read {}", document.display()))?;
    let text = replace(&text, section, &table(&records))?;
    fs::write(document, text).with_context(|| format!("write {}", document.display()))
}

/// Writes docs/scale.md, if its section was run.
fn large_clusters(docs: &Path, results: &Path) -> Result<()> {
    let records = read(results, "scale");
    if records.is_empty() {
        return Ok(());
    }
    let document = docs.join("scale.md");
    let mut text =
        fs::read_to_string(&document).with_context(|| format!("read {}", document.display()))?;
    let runs = runs::left(&records);
    let figures = scale::Figures::of(&runs);
    let drawn = scale_plots::draw(&figures, &docs.join("scale"))?;
    let drawings: Vec<_> = drawn
        .iter()
        .map(|(title, file)| format!("![{title}](scale/{file})"))
        .collect();
    let parts = [
        ("scale: machine", runs::machines(&runs)),
        ("scale: goals", figures.goals()),
        ("scale: starts", figures.starts()),
        ("scale: changes", figures.changes()),
        ("scale: restarts", figures.restarts()),
        ("scale: first", figures.first()),
        ("scale: fan", fan::tables(&figures)),
        ("scale: failures", figures.failures()),
        ("scale: drawings", drawings.join("\n\n")),
    ];
    for (name, body) in parts.iter().filter(|(_, body)| !body.is_empty()) {
        text = replace(&text, name, body)?;
    }
    fs::write(&document, text).with_context(|| format!("write {}", document.display()))
}

/// Writes what docs/scale.md has of other kernels, if one was measured. Their guests run without
/// the section of this machine.
fn other_kernels(docs: &Path, results: &Path) -> Result<()> {
    let Some(tables) = kernels(results) else {
        return Ok(());
    };
    let document = docs.join("scale.md");
    let text =
        fs::read_to_string(&document).with_context(|| format!("read {}", document.display()))?;
    let text = replace(&text, "scale: kernels", &tables)?;
    fs::write(&document, text).with_context(|| format!("write {}", document.display()))
}

/// Returns the tables of other kernels, each after what its guest said of itself. None if no kernel
/// was measured.
fn kernels(results: &Path) -> Option<String> {
    let mut tables = Vec::new();
    for series in KERNELS {
        let records = read(results, &format!("scale-{series}"));
        tables.extend(
            runs::left(&records)
                .iter()
                .map(|run| format!("{}\n\n{}", run.head(), run.figures.of_guest())),
        );
    }
    (!tables.is_empty()).then(|| tables.join("\n\n"))
}

/// Returns the machine of a section, and what its run said of itself.
fn with_notes(records: &[Record]) -> String {
    let note = |record: &Record| {
        if let Record::Note(note) = record {
            Some(note.clone())
        } else {
            None
        }
    };
    [figures::machine(records)]
        .into_iter()
        .chain(records.iter().filter_map(note))
        .collect::<Vec<_>>()
        .join("\n\n")
}

/// Returns the records of a section; none if an older benchmark wrote them, whose figures then stay
/// in the document.
fn read(results: &Path, section: &str) -> Vec<Record> {
    record::read(results, section).unwrap_or_else(|error| {
        eprintln!("the figures of {section} stay as they were: {error:#}");
        Vec::new()
    })
}

fn sample(record: &Record) -> Option<Sample> {
    match record {
        Record::Sample(sample) => Some(sample.clone()),
        _ => None,
    }
}

/// Puts `body` between the two lines that name it.
fn replace(text: &str, name: &str, body: &str) -> Result<String> {
    let [begin, end] = ["measured", "end of"].map(|what| format!("<!-- {what} {name} -->\n"));
    let (head, rest) = text
        .split_once(&begin)
        .with_context(|| format!("no line {begin}"))?;
    let (_, tail) = rest
        .split_once(&end)
        .with_context(|| format!("no line {end}"))?;
    Ok(format!("{head}{begin}\n{}\n\n{end}{tail}", body.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_table_of_a_kernel_has_its_own_machine() {
        let folder = tempfile::tempdir().unwrap();
        let run = |memory: u32, services: u32| {
            format!(
                r#"{{"machine":{{"processor":"P","cpus":1,"memory_gib":{memory},"kernel":"K","kpx":"","iptables":"","nft":"","date":"D"}}}}
{{"figure":{{"by":"kpx","services":{services},"endpoints":50,"what":"programmed","found":{{"value":1.0}}}}}}
{{"note":"Slow."}}
"#
            )
        };
        fs::write(
            folder.path().join("scale-6.1.jsonl"),
            run(4, 1_000) + &run(18, 5_000),
        )
        .unwrap();
        let text = kernels(folder.path()).unwrap();
        let at = |part: &str| {
            text.find(part)
                .unwrap_or_else(|| panic!("no {part} in {text}"))
        };
        let order = [
            "4 GiB; Linux K",
            "Slow.",
            "1,000 Services × 50",
            "18 GiB; Linux K",
            "5,000 Services × 50",
        ]
        .map(at);
        assert!(order.is_sorted(), "{order:?}: {text}");
        assert_eq!(text.matches("Slow.").count(), 2, "{text}");
    }

    #[test]
    fn report_of_a_kernel_tells_what_its_guest_did_not_finish_and_what_failed() {
        let folder = tempfile::tempdir().unwrap();
        let figure = |by: &str, what: &str, found: &str| {
            format!(
                r#"{{"figure":{{"by":"{by}","services":9,"endpoints":1,"what":"{what}","found":{found}}}}}
"#
            )
        };
        let figures = [
            figure("kpx", "programmed", r#""unfinished""#),
            figure("kpx", "programmed", r#"{"value":7.0}"#),
            figure("kpx", "change100-p50", r#"{"value":8.0}"#),
            figure("kpx", "restart", r#"{"failed":"no answer"}"#),
            figure("kpx", "first-p50", r#"{"value":9.0}"#),
            figure("nftables", "programmed", r#""unfinished""#),
        ];
        fs::write(folder.path().join("scale-6.12.jsonl"), figures.concat()).unwrap();
        let text = kernels(folder.path()).unwrap();
        for part in [
            "→ programmed | 7.00 ms | not finished |",
            "| 8.00 ms |",
            "| 9 | 9 µs |",
            "endpoints: no answer",
        ] {
            assert!(text.contains(part), "no {part} in {text}");
        }
        assert!(!text.contains("Nothing failed."), "{text}");
    }

    #[test]
    fn report_changes_only_text_between_markers() {
        let text = "a\n<!-- measured x -->\nold\n<!-- end of x -->\nb\n";
        let new = "a\n<!-- measured x -->\n\nnew\n\n<!-- end of x -->\nb\n";
        assert_eq!(replace(text, "x", "new\n").unwrap(), new);
        assert_eq!(replace(new, "x", "new").unwrap(), new);
        assert!(replace(text, "y", "new").is_err());
    }
}
