//! Collects the errors of a configuration with their fields.

use std::fmt;
use std::str::FromStr;

use serde_json::Value;

use super::choice::must_be_one_of;
use super::flags::Flag;
use super::flags::table::FLAGS;
use crate::config::duration::GoDuration;
use crate::config::tree;

/// The choice whose empty value means unset.
const MAY_BE_EMPTY: &str = "attach";

/// An error in the API server's wording, with the flag that set the value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Invalid {
    pub(super) kind: &'static str,
    pub(super) field: String,
    pub(super) value: String,
    pub(super) why: String,
    pub(super) flag: Option<&'static str>,
}

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            kind,
            field,
            value,
            why,
            flag,
        } = self;
        write!(f, "{kind}.{field}")?;
        if let Some(flag) = flag {
            write!(f, " (--{flag})")?;
        }
        write!(f, ": Invalid value: {value}: {why}")
    }
}

#[derive(Debug)]
pub(super) struct InvalidConfiguration(pub(super) Vec<Invalid>);

impl fmt::Display for InvalidConfiguration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_slice() {
            [one] => one.fmt(f),
            all => {
                write!(f, "{} fields of the configuration are invalid:", all.len())?;
                all.iter()
                    .try_for_each(|invalid| write!(f, "\n  {invalid}"))
            }
        }
    }
}

impl std::error::Error for InvalidConfiguration {}

/// Checks the fields of a document, and collects the errors.
pub(super) struct Fields {
    kind: &'static str,
    pub(super) invalid: Vec<Invalid>,
}

impl Fields {
    pub(super) fn of(kind: &'static str) -> Self {
        Self {
            kind,
            invalid: Vec::new(),
        }
    }

    pub(super) fn refuse(&mut self, field: &str, value: impl fmt::Debug, why: impl Into<String>) {
        let field = field.to_owned();
        let value = format!("{value:?}");
        let why = why.into();
        self.invalid.push(Invalid {
            kind: self.kind,
            field,
            value,
            why,
            flag: None,
        });
    }

    pub(super) fn check(&mut self, holds: bool, field: &str, value: impl fmt::Debug, why: &str) {
        if !holds {
            self.refuse(field, value, why);
        }
    }

    pub(super) fn parse<T: FromStr>(&mut self, field: &str, text: &str, why: &str) -> Option<T> {
        let parsed = text.parse().ok();
        self.check(parsed.is_some(), field, text, why);
        parsed
    }

    /// Parses a list, and returns the valid items.
    pub(super) fn parse_each<T: FromStr>(
        &mut self,
        field: &str,
        texts: &[String],
        why: &str,
    ) -> Vec<T> {
        let texts = texts.iter().enumerate();
        texts
            .filter_map(|(index, text)| self.parse(&format!("{field}[{index}]"), text.trim(), why))
            .collect()
    }

    /// Removes from `document` each value outside the choices of its field, and converts booleans
    /// to words.
    pub(super) fn take_unknown_choices(&mut self, document: &mut Value) {
        for (field, values) in FLAGS.iter().filter_map(Flag::choice) {
            // YAML 1.1 parses the words `on` and `off` as booleans.
            if let Some(is_on) = tree::get(document, field).and_then(Value::as_bool) {
                let word = if is_on { "on" } else { "off" };
                tree::set(document, field, word.into());
            }
            let Some(text) = tree::get(document, field).and_then(Value::as_str) else {
                continue;
            };
            if values.iter().any(|value| value.get_name() == text)
                || (text.is_empty() && field == MAY_BE_EMPTY)
            {
                continue;
            }
            self.refuse(field, text, must_be_one_of(&values));
            document
                .as_object_mut()
                .into_iter()
                .for_each(|fields| drop(fields.remove(field)));
        }
    }

    pub(super) fn has_refused(&self, field: &str) -> bool {
        self.invalid.iter().any(|invalid| invalid.field == field)
    }

    pub(super) fn not_negative(&mut self, field: &str, duration: GoDuration) {
        let why = "must be greater than or equal to 0";
        self.check(duration >= GoDuration::ZERO, field, Shown(duration), why);
    }

    pub(super) fn at_most(&mut self, field: &str, number: u32, most: u32) {
        self.check(
            number <= most,
            field,
            number,
            &format!("must be at most {most}"),
        );
    }

    pub(super) fn positive(&mut self, field: &str, duration: GoDuration) {
        self.check(
            duration > GoDuration::ZERO,
            field,
            Shown(duration),
            "must be greater than 0",
        );
    }
}

/// A value whose debug form is its display form.
pub(super) struct Shown<T>(pub(super) T);

impl<T: fmt::Display> fmt::Debug for Shown<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
