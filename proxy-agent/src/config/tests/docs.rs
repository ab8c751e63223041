//! Compares the table in `docs/configuration.md` with the code. `UPDATE_EXPECT=1` rewrites the
//! table.

use std::collections::BTreeSet;
use std::fs;

use clap::CommandFactory as _;
use expect_test::expect_file;
use serde_json::Value;

use super::{Run, load};
use crate::config::flags::table::{FIELDS_WITHOUT_FLAG, FLAGS};
use crate::config::flags::{Effect, Flag};
use crate::config::tree;
use crate::config::{KpxConfiguration, KubeProxyConfiguration};

const DOCUMENT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/configuration.md");
const BEGIN: &str = "| flag | field | default | with `--config` | what kpx does with it |\n| --- | --- | --- | --- | --- |\n";

#[test]
fn document_has_the_table_of_the_code() {
    let text = fs::read_to_string(DOCUMENT).unwrap();
    let (before, rest) = text.split_once(BEGIN).expect("the head of the table");
    let end = rest.find("\n\n").map_or(rest.len(), |end| end + 1);
    expect_file![DOCUMENT].assert_eq(&format!("{before}{BEGIN}{}{}", table(), &rest[end..]));
}

#[test]
fn clap_knows_the_flags_of_the_table_and_no_others() {
    let command = Run::command();
    let known: BTreeSet<_> = command
        .get_arguments()
        .filter_map(|arg| arg.get_long())
        .collect();
    assert_eq!(known, FLAGS.iter().map(|flag| flag.name).collect());
    assert!(command.get_arguments().all(|arg| !arg.is_positional()));
}

#[test]
fn every_field_is_in_the_table() {
    let defaults = Defaults::new();
    let fields = |kind: &'static str, value: &Value| -> BTreeSet<(&'static str, String)> {
        leaves("", value)
            .into_iter()
            .filter(|path| !matches!(path.as_str(), "apiVersion" | "kind"))
            .map(|path| (kind, path))
            .collect()
    };
    let kube_proxy = fields(KubeProxyConfiguration::KIND, &defaults.kube_proxy);
    let all: BTreeSet<_> = kube_proxy
        .into_iter()
        .chain(fields(KpxConfiguration::KIND, &defaults.kpx))
        .collect();
    let by_flag = FLAGS.iter().flat_map(|flag| {
        let (kind, fields) = flag.effect.fields();
        fields
            .into_iter()
            .map(move |field| (kind, field.to_owned()))
    });
    let others = FIELDS_WITHOUT_FLAG
        .iter()
        .map(|(field, _)| (KubeProxyConfiguration::KIND, (*field).to_owned()));
    assert_eq!(by_flag.chain(others).collect::<BTreeSet<_>>(), all);
}

/// The defaults, including those that depend on other fields.
struct Defaults {
    kube_proxy: Value,
    kpx: Value,
}

impl Defaults {
    fn new() -> Self {
        let configuration = load("").unwrap();
        let kube_proxy = serde_json::to_value(configuration.kube_proxy).unwrap();
        Self {
            kube_proxy,
            kpx: serde_json::to_value(configuration.kpx).unwrap(),
        }
    }

    fn of(&self, kind: &str, field: &str) -> String {
        let document = if kind == KpxConfiguration::KIND {
            &self.kpx
        } else {
            &self.kube_proxy
        };
        match tree::get(document, field).unwrap_or_else(|| panic!("{kind}.{field}")) {
            Value::String(text) if text.is_empty() => "none".to_owned(),
            Value::String(text) => format!("`{text}`"),
            Value::Array(items) if items.is_empty() => "none".to_owned(),
            Value::Object(fields) if fields.is_empty() => "none".to_owned(),
            value => format!("`{value}`"),
        }
    }
}

fn table() -> String {
    let defaults = Defaults::new();
    let shown = FLAGS
        .iter()
        .filter(|flag| flag.effect != Effect::Development);
    let flags = shown.map(|flag| row(flag, &defaults));
    let others = FIELDS_WITHOUT_FLAG.iter().map(|(field, why)| {
        let default = defaults.of(KubeProxyConfiguration::KIND, field);
        format!("| | `{field}` | {default} | | ignored: {why} |\n")
    });
    flags.chain(others).collect()
}

fn row(flag: &Flag, defaults: &Defaults) -> String {
    let (kind, fields) = flag.effect.fields();
    let default = match flag.effect {
        Effect::Port(_) | Effect::Command | Effect::Development | Effect::Nothing => String::new(),
        _ => defaults.of(kind, fields[0]),
    };
    let owner = if kind == KpxConfiguration::KIND {
        "kpx: "
    } else {
        ""
    };
    let fields: Vec<_> = fields
        .iter()
        .map(|field| format!("{owner}`{field}`"))
        .collect();
    let with_config = match flag.effect {
        Effect::KubeProxy(_) | Effect::Port(_) => "the file counts",
        Effect::KubeProxyOver(_) | Effect::Kpx(_) => "the flag goes before",
        Effect::Command | Effect::Development | Effect::Nothing => "",
    };
    let aliases = flag.aliases.iter().map(|alias| match alias.len() {
        1 => format!(", `-{alias}`"),
        _ => format!(", `--{alias}`"),
    });
    let names: String = [format!("`--{}`", flag.name)]
        .into_iter()
        .chain(aliases)
        .collect();
    let what = if flag.is_obeyed {
        flag.help.to_owned()
    } else {
        format!("ignored: {}", flag.help)
    };
    format!(
        "| {names} | {} | {default} | {with_config} | {} |\n",
        fields.join(", "),
        what.replace('|', "\\|")
    )
}

/// Returns the paths of the fields without inner fields.
fn leaves(at: &str, value: &Value) -> Vec<String> {
    match value {
        Value::Object(fields) if !fields.is_empty() => fields
            .iter()
            .flat_map(|(key, field)| {
                let dot = if at.is_empty() { "" } else { "." };
                leaves(&format!("{at}{dot}{key}"), field)
            })
            .collect(),
        _ => vec![at.to_owned()],
    }
}
