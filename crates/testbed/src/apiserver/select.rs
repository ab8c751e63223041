//! Label and field selectors.

use serde_json::Value;

use super::failure::{Failure, Outcome};
use super::kinds::Kind;

/// The requirements of a list or a watch, all of which must hold.
#[derive(Clone, Debug, Default)]
pub(crate) struct Selector {
    labels: Vec<Requirement>,
    fields: Vec<Requirement>,
}

#[derive(Clone, Debug)]
struct Requirement {
    /// A label, or a field's dotted path.
    what: String,
    test: Test,
}

#[derive(Clone, Debug)]
enum Test {
    Exists,
    Absent,
    In(Vec<String>),
    /// Also holds without a value.
    NotIn(Vec<String>),
}

impl Selector {
    pub(crate) fn parse(kind: &Kind, labels: Option<&str>, fields: Option<&str>) -> Outcome<Self> {
        Ok(Self {
            labels: split(labels.unwrap_or_default())
                .map(label_requirement)
                .collect::<Outcome<_>>()?,
            fields: split(fields.unwrap_or_default())
                .map(|f| field_requirement(kind, f))
                .collect::<Outcome<_>>()?,
        })
    }

    pub(crate) fn is_everything(&self) -> bool {
        self.labels.is_empty() && self.fields.is_empty()
    }

    pub(crate) fn matches(&self, object: &Value) -> bool {
        self.labels.iter().all(|r| {
            r.holds(
                object["metadata"]["labels"]
                    .get(&r.what)
                    .and_then(Value::as_str),
            )
        }) && self
            .fields
            .iter()
            .all(|r| r.holds(Some(&field(object, &r.what))))
    }
}

impl Requirement {
    fn holds(&self, value: Option<&str>) -> bool {
        let among = |values: &[String]| value.is_some_and(|v| values.iter().any(|w| w == v));
        match &self.test {
            Test::Exists => value.is_some(),
            Test::Absent => value.is_none(),
            Test::In(values) => among(values),
            Test::NotIn(values) => !among(values),
        }
    }
}

/// Splits requirements at commas outside a set's parentheses.
fn split(selector: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0;
    selector
        .split(move |c| {
            depth += i32::from(c == '(') - i32::from(c == ')');
            c == ',' && depth == 0
        })
        .map(str::trim)
        .filter(|r| !r.is_empty())
}

/// Parses `key`, `!key`, `key=value`, `key==value`, `key!=value`, `key in (a,b)`,
/// `key notin (a,b)`.
fn label_requirement(text: &str) -> Outcome<Requirement> {
    if let Some((what, test)) = equality(text) {
        return requirement(text, what, test);
    }
    if let Some((what, set)) = text.strip_suffix(')').and_then(|t| t.split_once('(')) {
        let values = set.split(',').map(|v| v.trim().to_owned()).collect();
        let mut words = what.split_whitespace();
        return match (words.next(), words.next(), words.next()) {
            (Some(what), Some("in"), None) => requirement(text, what, Test::In(values)),
            (Some(what), Some("notin"), None) => requirement(text, what, Test::NotIn(values)),
            _ => Err(unreadable(text)),
        };
    }
    match text.strip_prefix('!') {
        Some(what) => requirement(text, what.trim(), Test::Absent),
        None => requirement(text, text, Test::Exists),
    }
}

fn field_requirement(kind: &Kind, text: &str) -> Outcome<Requirement> {
    let (what, test) = equality(text).ok_or_else(|| {
        Failure::bad_request(format!(
            "invalid selector: '{text}'; can't understand '{text}'"
        ))
    })?;
    let known = what == "metadata.name" || (kind.namespaced && what == "metadata.namespace");
    if !known && !kind.fields.contains(&what) {
        return Err(Failure::bad_request(format!(
            "field label not supported: {what}"
        )));
    }
    Ok(Requirement {
        what: what.to_owned(),
        test,
    })
}

fn equality(text: &str) -> Option<(&str, Test)> {
    let (what, value) = text.split_once('=')?;
    let value = vec![value.strip_prefix('=').unwrap_or(value).trim().to_owned()];
    Some(match what.strip_suffix('!') {
        Some(what) => (what.trim(), Test::NotIn(value)),
        None => (what.trim(), Test::In(value)),
    })
}

fn requirement(text: &str, what: &str, test: Test) -> Outcome<Requirement> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
    if what.is_empty() || !what.chars().all(plain) {
        return Err(unreadable(text));
    }
    Ok(Requirement {
        what: what.to_owned(),
        test,
    })
}

fn unreadable(text: &str) -> Failure {
    Failure::bad_request(format!("unable to parse requirement: {text}"))
}

/// Returns the field at a path as field selectors see it; empty if missing.
fn field(object: &Value, path: &str) -> String {
    match path
        .split('.')
        .try_fold(object, |value, name| value.get(name))
    {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Bool(yes)) => yes.to_string(),
        _ if path == "spec.unschedulable" => "false".to_owned(),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::kinds::SERVICE;
    use super::*;
    use serde_json::json;

    #[test]
    fn requirements_select_labels() {
        let object = json!({"metadata": {"name": "a", "namespace": "b", "labels": {"app": "web", "x/y": ""}},
            "spec": {"clusterIP": "None"}});
        let rows = [
            ("app=web", "", true),
            ("app==web", "", true),
            ("app!=web", "", false),
            ("other!=web", "", true),
            ("app in (db, web),x/y", "", true),
            ("app notin (db,web)", "", false),
            ("other notin (db,web)", "", true),
            ("!app", "", false),
            ("!other,app", "", true),
            ("x/y=", "", true),
            ("", "metadata.name=a,metadata.namespace!=c", true),
            ("", "spec.clusterIP!=None", false),
            ("app", "spec.clusterIP==None", true),
        ];
        for (labels, fields, want) in rows {
            let selector = Selector::parse(SERVICE, Some(labels), Some(fields)).unwrap();
            assert_eq!(
                selector.matches(&object),
                want,
                "labels {labels:?} fields {fields:?}"
            );
        }
    }

    #[test]
    fn unreadable_selectors_are_refused() {
        for (labels, fields) in [
            ("a b", ""),
            ("a in b", ""),
            ("=x", ""),
            ("a out (b)", ""),
            ("", "spec.foo=1"),
            ("", "x"),
        ] {
            let refusal = Selector::parse(SERVICE, Some(labels), Some(fields)).unwrap_err();
            assert_eq!(refusal.code, 400, "labels {labels:?} fields {fields:?}");
        }
    }
}
