//! Selects objects by their labels, as kubectl's `-l` and the API's LabelSelector do.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

/// The labels of an object.
pub type Labels = BTreeMap<Box<str>, Box<str>>;

/// A selector: an object must meet all of its requirements.
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
    /// An object without the label meets it as well.
    NotIn(BTreeSet<Box<str>>),
    Exists,
    DoesNotExist,
}

/// The longest selector that is read, in bytes. An annotation may have 256 KiB.
pub const MOST_BYTES: usize = 4_096;

impl Selector {
    /// Reads a text in kubectl's form: `app=cache,tier in (a, b),!old`. An empty text would select every object, and is refused.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text.len() > MOST_BYTES {
            return Err(format!("a selector may have {MOST_BYTES} bytes"));
        }
        if text.trim().is_empty() {
            return Err("an empty selector would select every pod of the namespace".to_owned());
        }
        parts(text)?.into_iter().map(Requirement::parse).collect::<Result<_, _>>().map(Self)
    }

    /// Reads a selector of the API. An empty one selects every object. The error begins with the field.
    pub fn of(selector: &LabelSelector) -> Result<Self, String> {
        let labels = selector.match_labels.iter().flatten().map(|(key, value)| {
            let is_read = |error| format!("matchLabels: {error}");
            Requirement::new(key, Operator::In(values([value.as_str()]).map_err(is_read)?)).map_err(is_read)
        });
        let expressions = selector.match_expressions.iter().flatten().enumerate().map(|(index, expression)| {
            let given = expression.values.iter().flatten().map(String::as_str);
            let has_values = given.clone().next().is_some();
            let operator = match (expression.operator.as_str(), has_values) {
                ("In", true) => values(given).map(Operator::In),
                ("NotIn", true) => values(given).map(Operator::NotIn),
                ("Exists", false) => Ok(Operator::Exists),
                ("DoesNotExist", false) => Ok(Operator::DoesNotExist),
                ("In" | "NotIn", false) => Err("has no values".to_owned()),
                ("Exists" | "DoesNotExist", true) => Err("takes no values".to_owned()),
                (other, _) => Err(format!("operator {other:?} is not one of In, NotIn, Exists, DoesNotExist")),
            };
            let read = operator.and_then(|operator| Requirement::new(&expression.key, operator));
            read.map_err(|error| format!("matchExpressions[{index}]: {error}"))
        });
        labels.chain(expressions).collect::<Result<_, _>>().map(Self)
    }

    pub fn selects(&self, labels: &Labels) -> bool {
        self.0.iter().all(|requirement| {
            let value = labels.get(&requirement.key);
            match &requirement.operator {
                Operator::In(values) => value.is_some_and(|value| values.contains(value)),
                Operator::NotIn(values) => value.is_none_or(|value| !values.contains(value)),
                Operator::Exists => value.is_some(),
                Operator::DoesNotExist => value.is_none(),
            }
        })
    }
}

/// Splits a text at its commas, except those between parentheses.
fn parts(text: &str) -> Result<Vec<&str>, String> {
    let (mut parts, mut from, mut is_inside) = (Vec::new(), 0, false);
    for (at, letter) in text.char_indices() {
        match letter {
            '(' | ')' if (letter == '(') == is_inside => return Err(format!("{text:?}: misplaced {letter:?}")),
            '(' | ')' => is_inside = !is_inside,
            ',' if !is_inside => {
                parts.push(&text[from..at]);
                from = at + 1;
            }
            _ => {}
        }
    }
    if is_inside {
        return Err(format!("{text:?}: no \")\""));
    }
    parts.push(&text[from..]);
    Ok(parts)
}

impl Requirement {
    fn new(key: &str, operator: Operator) -> Result<Self, String> {
        let name = key.rsplit('/').next().unwrap_or_default();
        let is_key = !name.is_empty() && key.len() <= 253 + 64 && key.split('/').count() <= 2 && is_plain(key, "/");
        if is_key { Ok(Self { key: key.into(), operator }) } else { Err(format!("{key:?} is no key of a label")) }
    }

    fn parse(part: &str) -> Result<Self, String> {
        let part = part.trim();
        if let Some(key) = part.strip_prefix('!') {
            return Self::new(key.trim(), Operator::DoesNotExist);
        }
        if let Some((before, list)) = part.strip_suffix(')').and_then(|part| part.split_once('(')) {
            let listed = values(list.split(',').map(str::trim))?;
            return match before.split_whitespace().collect::<Vec<_>>()[..] {
                [key, "in"] => Self::new(key, Operator::In(listed)),
                [key, "notin"] => Self::new(key, Operator::NotIn(listed)),
                _ => Err(format!("{part:?} is not of the form `key in (a,b)` or `key notin (a,b)`")),
            };
        }
        for (sign, form) in [("!=", Operator::NotIn as fn(_) -> _), ("==", Operator::In), ("=", Operator::In)] {
            if let Some((key, value)) = part.split_once(sign) {
                return Self::new(key.trim(), form(values([value.trim()])?));
            }
        }
        Self::new(part, Operator::Exists)
    }
}

fn values<'a>(texts: impl IntoIterator<Item = &'a str>) -> Result<BTreeSet<Box<str>>, String> {
    let checked = texts.into_iter().map(|text| {
        let is_value = text.len() <= 63 && is_plain(text, "");
        if is_value { Ok(text.into()) } else { Err(format!("{text:?} is no value of a label")) }
    });
    checked.collect()
}

/// Returns true if a text has only letters of labels, or `others`.
fn is_plain(text: &str, others: &str) -> bool {
    text.chars().all(|letter| letter.is_ascii_alphanumeric() || "-_.".contains(letter) || others.contains(letter))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn labels(texts: &[(&str, &str)]) -> Labels {
        texts.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect()
    }

    #[test]
    fn a_text_selects_as_kubectl_does() {
        let pod = labels(&[("k8s-app", "dns"), ("tier", "node"), ("example.com/empty", "")]);
        for (text, selects) in [
            ("k8s-app=dns", true),
            (" k8s-app == dns , tier=node", true),
            ("k8s-app=dns,tier=cluster", false),
            ("k8s-app!=web", true),
            ("missing!=web", true),
            ("tier in (node, cluster)", true),
            ("tier notin (node,cluster)", false),
            ("missing notin (node)", true),
            ("example.com/empty", true),
            ("example.com/empty=", true),
            ("!missing", true),
            ("!tier", false),
        ] {
            let selector = Selector::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"));
            assert_eq!(selector.selects(&pod), selects, "{text}");
        }
    }

    #[test]
    fn a_wrong_text_is_refused_with_its_part() {
        let long = "a".repeat(MOST_BYTES + 1);
        for (text, error) in [
            ("", "an empty selector would select every pod of the namespace"),
            ("k8s-app=dns,", "\"\" is no key of a label"),
            ("a b", "\"a b\" is no key of a label"),
            ("a=b c", "\"b c\" is no value of a label"),
            ("a in b", "\"a in b\" is no key of a label"),
            ("a on (b)", "\"a on (b)\" is not of the form `key in (a,b)` or `key notin (a,b)`"),
            ("a in (b", "\"a in (b\": no \")\""),
            ("a in b)", "\"a in b)\": misplaced ')'"),
            ("{\"a\":\"b\"}", "\"{\\\"a\\\":\\\"b\\\"}\" is no key of a label"),
            (&long, "a selector may have 4096 bytes"),
        ] {
            assert_eq!(Selector::parse(text), Err(error.to_owned()), "{text}");
        }
    }

    #[test]
    fn a_selector_of_the_api_selects_as_its_text_does() {
        let read = |selector| Selector::of(&serde_json::from_value(selector).unwrap());
        let both = json!({
            "matchLabels": { "k8s-app": "dns" },
            "matchExpressions": [
                { "key": "tier", "operator": "In", "values": ["a", "b"] },
                { "key": "old", "operator": "DoesNotExist" },
            ],
        });
        assert_eq!(read(both), Selector::parse("k8s-app=dns,tier in (a,b),!old"));
        assert!(read(json!({})).unwrap().selects(&labels(&[])));
        let wrong = |operator: &str| json!({ "matchExpressions": [{ "key": "tier", "operator": operator }] });
        assert_eq!(read(wrong("In")), Err("matchExpressions[0]: has no values".to_owned()));
        let why = "matchExpressions[0]: operator \"Like\" is not one of In, NotIn, Exists, DoesNotExist";
        assert_eq!(read(wrong("Like")), Err(why.to_owned()));
    }
}
