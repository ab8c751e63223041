//! Selects objects by their labels, as `kubectl get -l` does.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

/// The requirements that an object's labels must meet, all of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selector {
    text: String,
    requirements: Vec<Requirement>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Requirement {
    key: String,
    /// The values, one of which the label must have; None for any value.
    values: Option<Vec<String>>,
    /// True if the label must not be so.
    is_not: bool,
}

impl Selector {
    /// Returns true if the labels meet all requirements. An object without a label meets each `!=` and `notin`, as for kubectl.
    pub fn selects(&self, labels: &BTreeMap<String, String>) -> bool {
        self.requirements.iter().all(|Requirement { key, values, is_not }| {
            let is_so =
                labels.get(key).is_some_and(|value| values.as_ref().is_none_or(|values| values.contains(value)));
            is_so != *is_not
        })
    }
}

impl FromStr for Selector {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.trim().is_empty() {
            return Ok(Self::default());
        }
        let mut is_inside = false;
        let parts = text.split(|letter| {
            is_inside = letter == '(' || is_inside && letter != ')';
            letter == ',' && !is_inside
        });
        let requirements = parts.map(|part| requirement(part.trim())).collect::<Result<_, _>>()?;
        Ok(Self { text: text.to_owned(), requirements })
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

fn requirement(text: &str) -> Result<Requirement, String> {
    let (key, values, is_not) = if let Some((key, value)) = text.split_once("!=") {
        (key, Some(vec![value]), true)
    } else if let Some((key, value)) = text.split_once('=') {
        (key, Some(vec![value.strip_prefix('=').unwrap_or(value)]), false)
    } else if let Some((words, list)) = text.split_once('(') {
        let list = list.strip_suffix(')').ok_or_else(|| format!("{text:?} has no `)` at its end"))?;
        let (key, is_not) = match words.split_whitespace().collect::<Vec<_>>()[..] {
            [key, "in"] => (key, false),
            [key, "notin"] => (key, true),
            _ => {
                return Err(format!("{text:?} is no requirement: KEY in (VALUE,…) or KEY notin (VALUE,…) is expected"));
            }
        };
        (key, Some(list.split(',').collect()), is_not)
    } else {
        (text.strip_prefix('!').unwrap_or(text), None, text.starts_with('!'))
    };
    let key = key.trim();
    if !is_key(key) {
        return Err(format!("{key:?} is no key of a label, in {text:?}"));
    }
    let values = values.map(|values| values.into_iter().map(str::trim).map(str::to_owned).collect::<Vec<_>>());
    if let Some(value) = values.iter().flatten().find(|value| !value.is_empty() && !is_word(value)) {
        return Err(format!("{value:?} is no value of a label, in {text:?}"));
    }
    Ok(Requirement { key: key.to_owned(), values, is_not })
}

/// Returns true for `[PREFIX/]NAME`.
fn is_key(text: &str) -> bool {
    match text.split_once('/') {
        Some((prefix, name)) => crate::object_name::is_name(prefix) && prefix.len() <= 253 && is_word(name),
        None => is_word(text),
    }
}

/// Returns true for at most 63 letters, digits, `-`, `_` and `.`, with a letter or digit at both ends.
fn is_word(text: &str) -> bool {
    let is_end = |end: Option<&u8>| end.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = text.as_bytes();
    let is_inner = |letter: &u8| letter.is_ascii_alphanumeric() || b"-_.".contains(letter);
    bytes.len() <= 63 && is_end(bytes.first()) && is_end(bytes.last()) && bytes.iter().all(is_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_meet_the_requirements_of_kubectl() {
        let labels = |text: &str| -> BTreeMap<String, String> {
            text.split_whitespace().filter_map(|one| one.split_once('=')).map(|(a, b)| (a.into(), b.into())).collect()
        };
        let web = labels("app=web tier=front app.kubernetes.io/name=web empty=");
        let cases = [
            ("", true),
            ("app=web", true),
            ("app==web", true),
            ("app=db", false),
            ("app!=db", true),
            ("missing!=db", true),
            ("app!=web", false),
            ("app", true),
            ("missing", false),
            ("!missing", true),
            ("! app", false),
            ("app in (db, web)", true),
            ("app in (db)", false),
            ("app notin (db,web)", false),
            ("missing notin (db)", true),
            ("missing in (db)", false),
            ("empty=", true),
            ("app=", false),
            ("app.kubernetes.io/name=web,tier in (front,back),!old", true),
            ("app in (web,db),tier=back", false),
        ];
        for (text, selected) in cases {
            assert_eq!(text.parse::<Selector>().unwrap().selects(&web), selected, "{text}");
        }
    }

    #[test]
    fn wrong_selector_is_named() {
        let error = |text: &str| text.parse::<Selector>().unwrap_err();
        assert_eq!(error("app=web,"), "\"\" is no key of a label, in \"\"");
        assert_eq!(error("app=we b"), "\"we b\" is no value of a label, in \"app=we b\"");
        assert_eq!(error("app in (a"), "\"app in (a\" has no `)` at its end");
        assert_eq!(
            error("app of (a)"),
            "\"app of (a)\" is no requirement: KEY in (VALUE,…) or KEY notin (VALUE,…) is expected"
        );
        for text in ["=web", "a/b/c=d", "app>1", "-app", "App_/x=y"] {
            assert!(text.parse::<Selector>().is_err(), "{text}");
        }
    }
}
