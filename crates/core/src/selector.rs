//! Selects objects by their labels, as kubectl's `-l` and the API's LabelSelector do.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

pub type Labels = BTreeMap<Box<str>, Box<str>>;

/// A selector: the conjunction of its requirements. An empty selector matches every object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selector(Vec<Requirement>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Requirement {
    key: Box<str>,
    operator: Operator,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Operator {
    In(BTreeSet<Box<str>>),
    /// Also matches objects without the label.
    NotIn(BTreeSet<Box<str>>),
    Exists,
    DoesNotExist,
    /// The label is an integer above this value.
    Above(i64),
    Below(i64),
}

impl Selector {
    /// Parses an API selector. The error begins with the field.
    pub fn of(selector: &LabelSelector) -> Result<Self, String> {
        let labels = selector.match_labels.iter().flatten().map(|(key, value)| {
            let read = values([value.as_str()])
                .and_then(|values| Requirement::new(key, Operator::In(values)));
            read.map_err(|error| format!("matchLabels: {error}"))
        });
        let expressions =
            selector
                .match_expressions
                .iter()
                .flatten()
                .enumerate()
                .map(|(index, expression)| {
                    let given = expression.values.iter().flatten().map(String::as_str);
                    let has_values = given.clone().next().is_some();
                    let operator = match (expression.operator.as_str(), has_values) {
                        ("In", true) => values(given).map(Operator::In),
                        ("NotIn", true) => values(given).map(Operator::NotIn),
                        ("Exists", false) => Ok(Operator::Exists),
                        ("DoesNotExist", false) => Ok(Operator::DoesNotExist),
                        ("In" | "NotIn", false) => Err("has no values".to_owned()),
                        ("Exists" | "DoesNotExist", true) => Err("takes no values".to_owned()),
                        (other, _) => Err(format!(
                            "operator {other:?} is not one of In, NotIn, Exists, DoesNotExist"
                        )),
                    };
                    let read =
                        operator.and_then(|operator| Requirement::new(&expression.key, operator));
                    read.map_err(|error| format!("matchExpressions[{index}]: {error}"))
                });
        labels
            .chain(expressions)
            .collect::<Result<_, _>>()
            .map(Self)
    }

    pub fn selects<T: Borrow<str> + Ord>(&self, labels: &BTreeMap<T, T>) -> bool {
        self.0.iter().all(|requirement| {
            let value = labels.get(&*requirement.key).map(Borrow::borrow);
            let number = || value.and_then(|value| value.parse::<i64>().ok());
            match &requirement.operator {
                Operator::In(values) => value.is_some_and(|value| values.contains(value)),
                Operator::NotIn(values) => value.is_none_or(|value| !values.contains(value)),
                Operator::Exists => value.is_some(),
                Operator::DoesNotExist => value.is_none(),
                Operator::Above(least) => number().is_some_and(|number| number > *least),
                Operator::Below(most) => number().is_some_and(|number| number < *most),
            }
        })
    }
}

/// Parses kubectl's form: `app=cache,tier in (a, b),!old`.
impl FromStr for Selector {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut words = Words(text);
        let mut requirements = Vec::new();
        if words.peek().is_empty() {
            return Ok(Self::default());
        }
        loop {
            requirements.push(words.requirement()?);
            match words.next() {
                "" => return Ok(Self(requirements)),
                "," => {}
                found => return Err(unexpected(found, "',' or the end")),
            }
        }
    }
}

/// Writes a text that parses to the same selector.
impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, requirement) in self.0.iter().enumerate() {
            write!(f, "{}{requirement}", if index == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

impl Requirement {
    fn new(key: &str, operator: Operator) -> Result<Self, String> {
        let (prefix, name) = key
            .split_once('/')
            .map_or((None, key), |(prefix, name)| (Some(prefix), name));
        if prefix.is_none_or(is_domain) && is_name(name) {
            return Ok(Self {
                key: key.into(),
                operator,
            });
        }
        Err(format!(
            "invalid key {key:?}: expected [PREFIX/]NAME: PREFIX is a DNS subdomain, NAME has {NAME}"
        ))
    }
}

impl fmt::Display for Requirement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, operator } = self;
        let one =
            |values: &BTreeSet<Box<str>>| values.first().filter(|_| values.len() == 1).cloned();
        let list = |values: &BTreeSet<Box<str>>| {
            values
                .iter()
                .map(|value| &**value)
                .collect::<Vec<_>>()
                .join(",")
        };
        match operator {
            Operator::In(values) => match one(values) {
                Some(value) => write!(f, "{key}={value}"),
                None => write!(f, "{key} in ({})", list(values)),
            },
            Operator::NotIn(values) => match one(values) {
                Some(value) => write!(f, "{key}!={value}"),
                None => write!(f, "{key} notin ({})", list(values)),
            },
            Operator::Exists => f.write_str(key),
            Operator::DoesNotExist => write!(f, "!{key}"),
            Operator::Above(number) => write!(f, "{key}>{number}"),
            Operator::Below(number) => write!(f, "{key}<{number}"),
        }
    }
}

/// The one-character tokens, and the characters of `==` and `!=`.
const SIGNS: [char; 7] = ['=', '!', '(', ')', ',', '<', '>'];
const SPACES: [char; 4] = [' ', '\t', '\r', '\n'];

/// The unread rest of a text, split into tokens.
struct Words<'a>(&'a str);

impl<'a> Words<'a> {
    /// Returns the next token, empty at the end, and the text behind it.
    fn split(&self) -> (&'a str, &'a str) {
        let text = self.0.trim_start_matches(SPACES);
        let length = match text.get(..2) {
            Some("==" | "!=") => 2,
            _ if text.starts_with(SIGNS) => 1,
            _ => text
                .find(|letter| SIGNS.contains(&letter) || SPACES.contains(&letter))
                .unwrap_or(text.len()),
        };
        text.split_at(length)
    }

    fn peek(&self) -> &'a str {
        self.split().0
    }

    fn next(&mut self) -> &'a str {
        let (word, rest) = self.split();
        self.0 = rest;
        word
    }

    /// Takes a token that is neither a sign nor the end.
    fn identifier(&mut self, what: &str) -> Result<&'a str, String> {
        match self.next() {
            found if found.is_empty() || found.starts_with(SIGNS) => Err(unexpected(found, what)),
            word => Ok(word),
        }
    }

    fn requirement(&mut self) -> Result<Requirement, String> {
        let is_not = self.peek() == "!";
        if is_not {
            self.next();
        }
        let key = self.identifier("a key")?;
        let operator = match (is_not, self.peek()) {
            (true, _) => Operator::DoesNotExist,
            (false, "" | ",") => Operator::Exists,
            (false, _) => self.binary()?,
        };
        Requirement::new(key, operator)
    }

    fn binary(&mut self) -> Result<Operator, String> {
        match self.next() {
            "=" | "==" => self.value().map(Operator::In),
            "!=" => self.value().map(Operator::NotIn),
            "in" => self.list().map(Operator::In),
            "notin" => self.list().map(Operator::NotIn),
            ">" => self.number().map(Operator::Above),
            "<" => self.number().map(Operator::Below),
            found => Err(unexpected(found, "one of in, notin, =, ==, !=, >, <")),
        }
    }

    /// Takes one value, possibly empty.
    fn value(&mut self) -> Result<BTreeSet<Box<str>>, String> {
        let value = if ["", ","].contains(&self.peek()) {
            ""
        } else {
            self.identifier("a value")?
        };
        values([value])
    }

    fn number(&mut self) -> Result<i64, String> {
        let word = self.identifier("an integer")?;
        word.parse().map_err(|_| unexpected(word, "an integer"))
    }

    /// Takes values in parentheses. A value may be empty.
    fn list(&mut self) -> Result<BTreeSet<Box<str>>, String> {
        match self.next() {
            "(" => {}
            found => return Err(unexpected(found, "'('")),
        }
        let mut listed = Vec::new();
        loop {
            let is_empty = self.peek().is_empty() || self.peek().starts_with(SIGNS);
            listed.push(if is_empty { "" } else { self.next() });
            match self.next() {
                "," => {}
                ")" => return values(listed),
                found => return Err(unexpected(found, "',' or ')'")),
            }
        }
    }
}

fn unexpected(found: &str, expected: &str) -> String {
    let found = if found.is_empty() {
        "the end".to_owned()
    } else {
        format!("{found:?}")
    };
    format!("found {found}, expected: {expected}")
}

fn values<'a>(texts: impl IntoIterator<Item = &'a str>) -> Result<BTreeSet<Box<str>>, String> {
    let checked = texts.into_iter().map(|text| {
        let is_value = text.is_empty() || is_name(text);
        if is_value {
            Ok(text.into())
        } else {
            Err(format!(
                "invalid value {text:?}: {NAME}, or nothing, is expected"
            ))
        }
    });
    checked.collect()
}

/// The valid form of a label's name and value.
const NAME: &str =
    "at most 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends";

fn is_name(text: &str) -> bool {
    let is_inner = |letter: u8| letter.is_ascii_alphanumeric() || b"-_.".contains(&letter);
    text.len() <= 63
        && has_ends(text, |letter| letter.is_ascii_alphanumeric())
        && text.bytes().all(is_inner)
}

/// Returns true for an RFC 1123 DNS subdomain.
fn is_domain(text: &str) -> bool {
    let is_end = |letter: u8| letter.is_ascii_lowercase() || letter.is_ascii_digit();
    let is_label = |label: &str| {
        has_ends(label, is_end) && label.bytes().all(|letter| is_end(letter) || letter == b'-')
    };
    text.len() <= 253 && text.split('.').all(is_label)
}

/// Returns true if the text is not empty and `is_end` accepts its first and last byte.
fn has_ends(text: &str, is_end: impl Fn(u8) -> bool) -> bool {
    let ends = text.bytes().next().zip(text.bytes().next_back());
    ends.is_some_and(|(first, last)| is_end(first) && is_end(last))
}

#[cfg(test)]
mod tests;
