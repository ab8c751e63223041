//! The flags of `kpx run`: kube-proxy's and kpx's, each with the field that it sets.

mod arg;
pub(super) mod table;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::builder::PossibleValue;
use serde_json::Value;

use super::kube_proxy::with_port;
use crate::config::tree;
use table::FLAGS;

/// A flag, and its effect in kpx.
#[derive(Debug)]
pub(super) struct Flag {
    pub(super) name: &'static str,
    /// The aliases; the first may be a single letter.
    pub(super) aliases: &'static [&'static str],
    pub(super) kind: Kind,
    pub(super) effect: Effect,
    pub(super) is_obeyed: bool,
    pub(super) help: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// The flag sets these fields of KubeProxyConfiguration, unless there is a `--config` file.
    KubeProxy(&'static [&'static str]),
    /// The flag sets this field of KubeProxyConfiguration, even over a `--config` file.
    KubeProxyOver(&'static str),
    /// The address of KubeProxyConfiguration whose port the flag sets.
    Port(&'static str),
    /// The flag sets this field of KpxConfiguration, even over a file.
    Kpx(&'static str),
    /// An action instead of a field.
    Command,
    /// A hidden flag for developers of kpx.
    Development,
    /// A field that no longer exists.
    Nothing,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    /// A boolean in Go's notation: `--flag` or `--flag=false`.
    Switch,
    Integer,
    /// An integer; this text is the value of a flag without a value.
    IntegerOr(&'static str),
    Number,
    Text,
    File,
    Dir,
    /// A comma-separated list; the flag may be repeated.
    List,
    /// A map of booleans: `A=true,B=false`.
    Gates,
    Duration,
    OneOf(&'static [&'static str]),
    /// A closed choice, with this function for its values.
    Choice(fn() -> Vec<PossibleValue>),
    /// A switch whose value may also be `raw`.
    Version,
}

/// The values of flags on the command line, by name.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct FlagValues(BTreeMap<&'static str, Value>);

/// The flags of `kpx run`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunArgs(pub(crate) FlagValues);

/// The flags that determine a node's treatment of packets, for `kpx trace`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeArgs(pub(super) FlagValues);

/// The flags of `kpx run` that `kpx check` uses.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CheckFlags(pub(super) FlagValues);

impl FlagValues {
    pub(crate) fn text(&self, flag: &str) -> Option<&str> {
        self.0
            .get(flag)
            .and_then(Value::as_str)
            .filter(|text| !text.is_empty())
    }

    pub(crate) fn path(&self, flag: &str) -> Option<PathBuf> {
        self.text(flag).map(|path| Path::new(path).to_owned())
    }

    pub(crate) fn is_set(&self, flag: &str) -> bool {
        self.0
            .get(flag)
            .is_some_and(|value| value == &Value::Bool(true))
    }

    pub(super) fn flags(&self) -> impl Iterator<Item = (&'static Flag, &Value)> {
        FLAGS
            .iter()
            .filter_map(|flag| Some((flag, self.0.get(flag.name)?)))
    }

    /// Returns the flag that set an invalid field.
    pub(super) fn flag_of(&self, kind: &str, field: &str, has_file: bool) -> Option<&'static str> {
        let counts = |flag: &Flag| !has_file || !flag.effect.is_overruled_by_file();
        self.flags()
            .find(|(flag, _)| flag.effect.is(kind, field) && counts(flag))
            .map(|(flag, _)| flag.name)
    }

    /// Writes the values into `kube_proxy` and `kpx`. If `has_file`, a file sets kube-proxy's
    /// fields.
    pub(super) fn apply(&self, kube_proxy: &mut Value, kpx: &mut Value, has_file: bool) {
        for (flag, value) in self.flags() {
            match flag.effect {
                // An empty value means unset: kube-proxy's manifests have many empty values.
                _ if value.as_str().is_some_and(str::is_empty) => {
                    self.switch_off(flag, kube_proxy, has_file)
                }
                Effect::KubeProxy(fields) if !has_file => {
                    fields
                        .iter()
                        .for_each(|field| tree::set(kube_proxy, field, value.clone()));
                }
                Effect::KubeProxyOver(field) => tree::set(kube_proxy, field, value.clone()),
                Effect::Kpx(field) => tree::set(kpx, field, value.clone()),
                Effect::KubeProxy(_)
                | Effect::Port(_)
                | Effect::Command
                | Effect::Development
                | Effect::Nothing => {}
            }
        }
        if !has_file {
            self.flags().for_each(|(flag, port)| {
                if let Effect::Port(field) = flag.effect {
                    set_port(kube_proxy, field, port);
                }
            });
        }
    }

    /// Disables an address. Only listening addresses can be disabled.
    fn switch_off(&self, flag: &Flag, kube_proxy: &mut Value, has_file: bool) {
        if let Effect::KubeProxy([field]) = flag.effect
            && matches!(*field, "healthzBindAddress" | "metricsBindAddress")
            && !has_file
        {
            tree::set(kube_proxy, field, Value::from(OFF));
        }
    }
}

/// The address that disables a listener: only its port 0 matters.
pub(super) const OFF: &str = "0.0.0.0:0";

/// Sets the port of an address that has none: `--healthz-port` and `--metrics-port`.
fn set_port(kube_proxy: &mut Value, field: &str, port: &Value) {
    let address = tree::get(kube_proxy, field)
        .and_then(Value::as_str)
        .unwrap_or_default();
    let address = match (port.as_u64().map(u16::try_from), address) {
        (Some(Ok(0)), _) => OFF.to_owned(),
        (Some(Ok(port)), address) if !address.is_empty() => with_port(address, "", port),
        _ => format!(":{port}"),
    };
    tree::set(kube_proxy, field, Value::from(address));
}

impl Flag {
    /// Returns the field of KpxConfiguration and its values, for a closed choice.
    pub(super) fn choice(&self) -> Option<(&'static str, Vec<PossibleValue>)> {
        match (self.effect, self.kind) {
            (Effect::Kpx(field), Kind::Choice(values)) => Some((field, values())),
            _ => None,
        }
    }
}

impl Effect {
    pub(super) fn is_overruled_by_file(self) -> bool {
        matches!(self, Self::KubeProxy(_) | Self::Port(_))
    }

    pub(super) fn is(self, kind: &str, field: &str) -> bool {
        let (own_kind, own_fields) = self.fields();
        own_kind == kind
            && own_fields.iter().any(|own| {
                field
                    .strip_prefix(own)
                    .is_some_and(|rest| !rest.starts_with(char::is_alphanumeric))
            })
    }

    /// Returns the kind of document and the fields that a flag sets.
    pub(super) fn fields(self) -> (&'static str, Vec<&'static str>) {
        let kube_proxy = super::KubeProxyConfiguration::KIND;
        match self {
            Self::KubeProxy(fields) => (kube_proxy, fields.to_vec()),
            Self::KubeProxyOver(field) | Self::Port(field) => (kube_proxy, vec![field]),
            Self::Kpx(field) => (super::KpxConfiguration::KIND, vec![field]),
            Self::Command | Self::Development | Self::Nothing => ("", Vec::new()),
        }
    }
}

/// Returns the command line in clap's form. Inserts `cluster` under the plugin's name, and `run`
/// under kube-proxy's name or if only flags are given. Replaces `_` in a flag's name by `-`, as
/// kube-proxy does.
pub fn arguments(given: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = given.into_iter().collect();
    let own_name = arguments
        .first()
        .and_then(|name| Path::new(name).file_name())
        .unwrap_or_default()
        .to_owned();
    if own_name == proxy_cluster::PLUGIN {
        arguments.insert(1, "cluster".into());
        return arguments;
    }
    let is_kube_proxy = own_name == "kube-proxy";
    let first = arguments
        .get(1)
        .and_then(|first| first.to_str())
        .unwrap_or_default();
    let is_own = matches!(first, "-h" | "--help" | "-V" | "--version") || !first.starts_with('-');
    if (is_kube_proxy && (first.is_empty() || first.starts_with('-'))) || !is_own {
        arguments.insert(1, "run".into());
    }
    if arguments.get(1).is_some_and(|command| command == "run") {
        for argument in &mut arguments[2..] {
            if let Some(text) = argument.to_str().filter(|text| text.starts_with("--")) {
                let (name, value) = text.split_at(text.find('=').unwrap_or(text.len()));
                *argument = format!("{}{value}", name.replace('_', "-")).into();
            }
        }
    }
    arguments
}
