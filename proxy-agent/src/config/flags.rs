//! The flags of `kpx run`: kube-proxy's and kpx's own, each with the field that it stands for.

pub(super) mod table;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser as _, ValueParser};
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches, ValueHint};
use serde_json::{Map, Value};

use super::duration::GoDuration;
use super::kube_proxy::with_port;
use super::tree;
use table::FLAGS;

/// A flag, and what kpx does with it.
#[derive(Debug)]
pub(super) struct Flag {
    pub(super) name: &'static str,
    /// Other names, the first of them a single letter if it has one.
    pub(super) aliases: &'static [&'static str],
    pub(super) kind: Kind,
    pub(super) stands_for: StandsFor,
    pub(super) is_obeyed: bool,
    pub(super) help: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StandsFor {
    /// Fields of KubeProxyConfiguration. A `--config` file is asked instead.
    KubeProxy(&'static [&'static str]),
    /// A field of KubeProxyConfiguration, over what a `--config` file says.
    KubeProxyOver(&'static str),
    /// The port of an address of KubeProxyConfiguration.
    Port(&'static str),
    /// A field of KpxConfiguration, over what a file says.
    Kpx(&'static str),
    /// None: what to do rather than how.
    Deed,
    /// None that there is still.
    Nothing,
}

/// What a flag takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// As Go has them: `--flag` or `--flag=false`.
    Switch,
    Integer,
    Number,
    Text,
    File,
    Dir,
    /// With commas, or repeated.
    List,
    /// `A=true,B=false`.
    Gates,
    Duration,
    OneOf(&'static [&'static str]),
    /// Like a switch, but it may also be `raw`.
    Version,
}

/// What the command line says, by the name of the flag.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Given(BTreeMap<&'static str, Value>);

/// The flags of `kpx run`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunArgs(pub(super) Given);

/// Those of them that say how a node treats packets, for `kpx trace`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeArgs(pub(super) Given);

impl Given {
    pub(super) fn text(&self, flag: &str) -> Option<&str> {
        self.0.get(flag).and_then(Value::as_str).filter(|text| !text.is_empty())
    }

    pub(super) fn path(&self, flag: &str) -> Option<PathBuf> {
        self.text(flag).map(|path| Path::new(path).to_owned())
    }

    pub(super) fn is_set(&self, flag: &str) -> bool {
        self.0.get(flag).is_some_and(|value| value == &Value::Bool(true))
    }

    pub(super) fn flags(&self) -> impl Iterator<Item = (&'static Flag, &Value)> {
        FLAGS.iter().filter_map(|flag| Some((flag, self.0.get(flag.name)?)))
    }

    /// The flag that said what is wrong with a field.
    pub(super) fn flag_of(&self, kind: &str, field: &str, has_file: bool) -> Option<&'static str> {
        let counts = |flag: &Flag| !has_file || !flag.stands_for.is_overruled_by_file();
        self.flags().find(|(flag, _)| flag.stands_for.is(kind, field) && counts(flag)).map(|(flag, _)| flag.name)
    }

    /// Writes into `kube_proxy` and `kpx` what is said here. If `has_file`, kube-proxy's fields are the file's.
    pub(super) fn apply(&self, kube_proxy: &mut Value, kpx: &mut Value, has_file: bool) {
        for (flag, value) in self.flags() {
            match flag.stands_for {
                // An empty value says as much as none: kube-proxy's manifests are full of them.
                _ if value.as_str().is_some_and(str::is_empty) => self.switch_off(flag, kube_proxy, has_file),
                StandsFor::KubeProxy(fields) if !has_file => {
                    fields.iter().for_each(|field| tree::set(kube_proxy, field, value.clone()));
                }
                StandsFor::KubeProxyOver(field) => tree::set(kube_proxy, field, value.clone()),
                StandsFor::Kpx(field) => tree::set(kpx, field, value.clone()),
                StandsFor::KubeProxy(_) | StandsFor::Port(_) | StandsFor::Deed | StandsFor::Nothing => {}
            }
        }
        if !has_file {
            self.flags().for_each(|(flag, port)| {
                if let StandsFor::Port(field) = flag.stands_for {
                    set_port(kube_proxy, field, port);
                }
            });
        }
    }

    /// Only the addresses to listen on can be none.
    fn switch_off(&self, flag: &Flag, kube_proxy: &mut Value, has_file: bool) {
        if let StandsFor::KubeProxy([field]) = flag.stands_for
            && matches!(*field, "healthzBindAddress" | "metricsBindAddress")
            && !has_file
        {
            tree::set(kube_proxy, field, Value::from(OFF));
        }
    }
}

/// Port 0 stands for none. The address is of no matter then.
pub(super) const OFF: &str = "0.0.0.0:0";

/// `--healthz-port` and `--metrics-port`, for an address that comes without one.
fn set_port(kube_proxy: &mut Value, field: &str, port: &Value) {
    let address = tree::get(kube_proxy, field).and_then(Value::as_str).unwrap_or_default();
    let address = match (port.as_u64().map(u16::try_from), address) {
        (Some(Ok(0)), _) => OFF.to_owned(),
        (Some(Ok(port)), address) if !address.is_empty() => with_port(address, "", port),
        _ => format!(":{port}"),
    };
    tree::set(kube_proxy, field, Value::from(address));
}

impl StandsFor {
    pub(super) fn is_overruled_by_file(self) -> bool {
        matches!(self, Self::KubeProxy(_) | Self::Port(_))
    }

    pub(super) fn is(self, kind: &str, field: &str) -> bool {
        let (own_kind, own_fields) = self.fields();
        own_kind == kind
            && own_fields
                .iter()
                .any(|own| field.strip_prefix(own).is_some_and(|rest| !rest.starts_with(char::is_alphanumeric)))
    }

    /// Which kind of document, and which fields of it.
    pub(super) fn fields(self) -> (&'static str, Vec<&'static str>) {
        let kube_proxy = super::KubeProxyConfiguration::KIND;
        match self {
            Self::KubeProxy(fields) => (kube_proxy, fields.to_vec()),
            Self::KubeProxyOver(field) | Self::Port(field) => (kube_proxy, vec![field]),
            Self::Kpx(field) => (super::KpxConfiguration::KIND, vec![field]),
            Self::Deed | Self::Nothing => ("", Vec::new()),
        }
    }
}

impl Args for RunArgs {
    fn augment_args(command: Command) -> Command {
        command.args(FLAGS.iter().map(Flag::arg))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for RunArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        Ok(Self(given(matches, FLAGS.iter())))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for NodeArgs {
    fn augment_args(command: Command) -> Command {
        command
            .args(node_flags().map(Flag::arg).map(|arg| arg.help_heading("Of the node of --manifests, as of kpx run")))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for NodeArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        Ok(Self(given(matches, node_flags())))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

fn node_flags() -> impl Iterator<Item = &'static Flag> {
    FLAGS.iter().filter(|flag| table::OF_A_NODE.contains(&flag.name))
}

fn given(matches: &ArgMatches, flags: impl Iterator<Item = &'static Flag>) -> Given {
    let one = |flag: &'static Flag| {
        let mut values = matches.get_many::<Value>(flag.name)?.cloned();
        let first = values.next()?;
        Some((flag.name, values.fold(first, tree::join)))
    };
    Given(flags.filter_map(one).collect())
}

impl Flag {
    fn arg(&self) -> Arg {
        let arg = Arg::new(self.name).long(self.name).value_parser(self.kind.parser()).help(self.help);
        let arg = self.aliases.iter().fold(arg, |arg, alias| match alias.as_bytes() {
            [letter] => arg.short(char::from(*letter)),
            _ => arg.visible_alias(*alias),
        });
        let arg = arg.value_name(self.kind.value_name()).value_hint(self.kind.hint());
        let arg = match self.kind {
            Kind::Switch | Kind::Version => {
                arg.num_args(0..=1).require_equals(true).default_missing_value("true").hide_possible_values(true)
            }
            _ => arg.num_args(1).allow_hyphen_values(matches!(self.kind, Kind::Integer | Kind::Number)),
        };
        // Given again, lists go on and all else begins anew.
        let arg = match self.kind {
            Kind::List | Kind::Gates => arg.action(ArgAction::Append),
            _ => arg.action(ArgAction::Set).overrides_with(self.name),
        };
        let heading = match self.stands_for {
            _ if !self.is_obeyed => "Taken from kube-proxy and ignored",
            StandsFor::Kpx(_) => "Of kpx alone",
            StandsFor::Deed => "Deeds and files",
            _ => "As of kube-proxy",
        };
        arg.help_heading(heading).hide_short_help(!self.is_obeyed)
    }
}

impl Kind {
    pub(super) fn value_name(self) -> &'static str {
        match self {
            Self::Switch => "BOOL",
            Self::Integer => "N",
            Self::Number => "NUMBER",
            Self::Text => "TEXT",
            Self::File => "FILE",
            Self::Dir => "DIR",
            Self::List => "A,B,…",
            Self::Gates => "A=BOOL,…",
            Self::Duration => "DURATION",
            Self::OneOf(_) => "HOW",
            Self::Version => "HOW",
        }
    }

    fn hint(self) -> ValueHint {
        match self {
            Self::File => ValueHint::FilePath,
            Self::Dir => ValueHint::DirPath,
            _ => ValueHint::Unknown,
        }
    }

    fn parser(self) -> ValueParser {
        match self {
            Self::OneOf(values) => {
                let empty = PossibleValue::new("").hide(true);
                PossibleValuesParser::new(values.iter().map(PossibleValue::new).chain([empty])).map(Value::from).into()
            }
            Self::Version => {
                PossibleValuesParser::new(["true", "false", "raw"]).map(|text| Value::from(text != "false")).into()
            }
            _ => ValueParser::new(move |text: &str| self.parse(text)),
        }
    }

    fn parse(self, text: &str) -> Result<Value, String> {
        let items = || text.split(',').map(str::trim).filter(|item| !item.is_empty());
        match self {
            Self::Switch => switch(text).map(Value::from),
            Self::Integer => text.parse::<i64>().map(Value::from).map_err(|_| "must be an integer".to_owned()),
            Self::Number => text.parse::<f64>().map(Value::from).map_err(|_| "must be a number".to_owned()),
            Self::List => Ok(items().map(Value::from).collect()),
            Self::Gates => {
                let gate = |item: &str| {
                    let (name, value) =
                        item.split_once('=').ok_or_else(|| format!("{item:?} is not NAME=true|false"))?;
                    Ok((name.trim().to_owned(), Value::from(switch(value.trim())?)))
                };
                items().map(gate).collect::<Result<Map<_, _>, String>>().map(Value::Object)
            }
            Self::Duration => text.parse::<GoDuration>().map(|_| Value::from(text)).map_err(|error| error.to_string()),
            Self::Text | Self::File | Self::Dir | Self::OneOf(_) | Self::Version => Ok(Value::from(text)),
        }
    }
}

/// As Go's `strconv.ParseBool`.
fn switch(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err("must be true or false".to_owned()),
    }
}

/// A command line as clap wants it: under kube-proxy's name, or with nothing but flags, `run` is meant; and kube-proxy
/// takes `_` for `-` in the names of flags.
pub fn arguments(given: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = given.into_iter().collect();
    let is_kube_proxy =
        arguments.first().is_some_and(|name| Path::new(name).file_name().is_some_and(|name| name == "kube-proxy"));
    let first = arguments.get(1).and_then(|first| first.to_str()).unwrap_or_default();
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
