//! Defines the flags for clap, and parses each value into the value of its field.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser as _, ValueParser};
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches, ValueHint};
use serde_json::{Map, Value};

use super::table::{FLAGS, OF_A_CHECK, OF_A_NODE};
use super::{CheckFlags, Effect, Flag, FlagValues, Kind, NodeArgs, RunArgs};
use crate::config::duration::GoDuration;
use crate::config::tree;

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
        command.args(
            node_flags()
                .map(Flag::arg)
                .map(|arg| arg.help_heading("Flags of kpx run for the node, with --manifests")),
        )
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

impl Args for CheckFlags {
    fn augment_args(command: Command) -> Command {
        command.args(
            check_flags()
                .map(Flag::arg)
                .map(|arg| arg.help_heading("kpx run flags")),
        )
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for CheckFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        Ok(Self(given(matches, check_flags())))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

fn check_flags() -> impl Iterator<Item = &'static Flag> {
    FLAGS.iter().filter(|flag| OF_A_CHECK.contains(&flag.name))
}

fn node_flags() -> impl Iterator<Item = &'static Flag> {
    FLAGS.iter().filter(|flag| OF_A_NODE.contains(&flag.name))
}

fn given(matches: &ArgMatches, flags: impl Iterator<Item = &'static Flag>) -> FlagValues {
    let one = |flag: &'static Flag| {
        let mut values = matches.get_many::<Value>(flag.name)?.cloned();
        let first = values.next()?;
        Some((flag.name, values.fold(first, tree::join)))
    };
    FlagValues(flags.filter_map(one).collect())
}

impl Flag {
    fn arg(&self) -> Arg {
        let arg = Arg::new(self.name)
            .long(self.name)
            .value_parser(self.kind.parser())
            .help(self.help);
        let arg = self
            .aliases
            .iter()
            .fold(arg, |arg, alias| match alias.as_bytes() {
                [letter] => arg.short(char::from(*letter)),
                _ => arg.visible_alias(*alias),
            });
        let arg = arg
            .value_name(self.kind.value_name())
            .value_hint(self.kind.hint());
        let arg = match self.kind {
            Kind::Switch | Kind::Version => arg
                .num_args(0..=1)
                .require_equals(true)
                .default_missing_value("true")
                .hide_possible_values(true),
            Kind::IntegerOr(value) => arg
                .num_args(0..=1)
                .require_equals(true)
                .default_missing_value(value),
            _ => arg
                .num_args(1)
                .allow_hyphen_values(matches!(self.kind, Kind::Integer | Kind::Number)),
        };
        // A repeated list grows; any other repeated flag replaces the earlier value.
        let arg = match self.kind {
            Kind::List | Kind::Gates => arg.action(ArgAction::Append),
            _ => arg.action(ArgAction::Set).overrides_with(self.name),
        };
        let heading = match self.effect {
            _ if !self.is_obeyed => "kube-proxy flags accepted and ignored",
            Effect::Kpx(_) => "kpx flags",
            Effect::Command => "Actions and files",
            _ => "kube-proxy flags",
        };
        arg.help_heading(heading)
            .hide_short_help(!self.is_obeyed)
            .hide(self.effect == Effect::Development)
    }
}

impl Kind {
    pub(super) fn value_name(self) -> &'static str {
        match self {
            Self::Switch => "BOOL",
            Self::Integer | Self::IntegerOr(_) => "N",
            Self::Number => "NUMBER",
            Self::Text => "TEXT",
            Self::File => "FILE",
            Self::Dir => "DIR",
            Self::List => "A,B,…",
            Self::Gates => "A=BOOL,…",
            Self::Duration => "DURATION",
            Self::OneOf(_) | Self::Choice(_) => "HOW",
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
            Self::OneOf(values) => one_of(values.iter().map(PossibleValue::new)),
            Self::Choice(values) => one_of(values().into_iter()),
            Self::Version => PossibleValuesParser::new(["true", "false", "raw"])
                .map(|text| Value::from(text != "false"))
                .into(),
            _ => ValueParser::new(move |text: &str| self.parse(text)),
        }
    }

    fn parse(self, text: &str) -> Result<Value, String> {
        let items = || {
            text.split(',')
                .map(str::trim)
                .filter(|item| !item.is_empty())
        };
        match self {
            Self::Switch => switch(text).map(Value::from),
            Self::Integer | Self::IntegerOr(_) => text
                .parse::<i64>()
                .map(Value::from)
                .map_err(|_| "must be an integer".to_owned()),
            Self::Number => text
                .parse::<f64>()
                .map(Value::from)
                .map_err(|_| "must be a number".to_owned()),
            Self::List => Ok(items().map(Value::from).collect()),
            Self::Gates => {
                let gate = |item: &str| {
                    let (name, value) = item
                        .split_once('=')
                        .ok_or_else(|| format!("{item:?} is not NAME=true|false"))?;
                    Ok((name.trim().to_owned(), Value::from(switch(value.trim())?)))
                };
                items()
                    .map(gate)
                    .collect::<Result<Map<_, _>, String>>()
                    .map(Value::Object)
            }
            Self::Duration => text
                .parse::<GoDuration>()
                .map(|_| Value::from(text))
                .map_err(|error| error.to_string()),
            Self::Text
            | Self::File
            | Self::Dir
            | Self::OneOf(_)
            | Self::Choice(_)
            | Self::Version => Ok(Value::from(text)),
        }
    }
}

/// Returns a parser of a closed choice. An empty value is valid and means unset.
fn one_of(values: impl Iterator<Item = PossibleValue>) -> ValueParser {
    PossibleValuesParser::new(values.chain([PossibleValue::new("").hide(true)]))
        .map(Value::from)
        .into()
}

/// Parses a boolean as Go's `strconv.ParseBool` does.
fn switch(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err("must be true or false".to_owned()),
    }
}
