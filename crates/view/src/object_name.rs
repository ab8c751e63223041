//! Names of objects, as every command accepts them: `NAME`, `NAMESPACE/NAME`, `svc/NAME`,
//! `svc/NAMESPACE/NAME`.

use std::fmt;
use std::str::FromStr;

use anyhow::{Result, bail};

use crate::ServiceView;

/// kubectl's words for a Service.
pub const SERVICES: &[&str] = &["svc", "service", "services"];

/// The minimum similarity (0 to 1) of a suggested name.
const SIMILAR: f64 = 0.6;
/// The factor on the similarity of a name in another namespace.
const ELSEWHERE: f64 = 0.95;

/// An object's name. A name without namespace must be unique in the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectName {
    pub namespace: Option<String>,
    pub name: String,
}

/// The name of a Service, with or without its kind as prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceName(pub ObjectName);

impl FromStr for ObjectName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (namespace, name) = match text.split_once('/') {
            Some((namespace, name)) => (Some(namespace), name),
            None => (None, text),
        };
        if ![Some(name), namespace].into_iter().flatten().all(is_name) {
            return Err(format!("{text:?} is not a name: expected [NAMESPACE/]NAME"));
        }
        Ok(Self {
            namespace: namespace.map(str::to_owned),
            name: name.to_owned(),
        })
    }
}

impl FromStr for ServiceName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let name = match text.split_once('/') {
            Some((kind, name)) if SERVICES.contains(&kind) => name,
            _ => text,
        };
        name.parse().map(Self)
    }
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.namespace {
            Some(namespace) => write!(f, "{namespace}/{}", self.name),
            None => f.write_str(&self.name),
        }
    }
}

impl ServiceName {
    /// Sets the namespace, unless the name has one.
    pub fn within(mut self, namespace: Option<&str>) -> Self {
        self.0.namespace = self.0.namespace.or_else(|| namespace.map(str::to_owned));
        self
    }

    pub fn is(&self, service: &ServiceView) -> bool {
        self.matches(&service.namespace, &service.name)
    }

    /// Returns true if this names the Service `name` of `namespace`.
    pub fn matches(&self, namespace: &str, name: &str) -> bool {
        let Self(wanted) = self;
        name == wanted.name
            && wanted
                .namespace
                .as_ref()
                .is_none_or(|wanted| namespace == wanted)
    }

    /// Returns the Service of this name. Fails if no Service or several Services match.
    pub fn find<'a>(&self, services: &'a [ServiceView]) -> Result<&'a ServiceView> {
        let found: Vec<_> = services.iter().filter(|service| self.is(service)).collect();
        match found[..] {
            [service] => Ok(service),
            [] => bail!(self.unknown(services)),
            _ => {
                let names: Vec<_> = found.iter().map(|service| full_name(service)).collect();
                bail!(
                    "several Services are called {}: {}",
                    self.0,
                    names.join(", ")
                )
            }
        }
    }

    /// Returns an error text for a missing Service, with the most similar name.
    pub fn unknown(&self, services: &[ServiceView]) -> String {
        format!(
            "kpx serves no Service {}{}",
            self.0,
            suggestion(&self.0, services.iter().map(full_name))
        )
    }
}

/// Returns the name of a Service as `NAMESPACE/NAME`.
pub fn full_name(service: &ServiceView) -> String {
    format!("{}/{}", service.namespace, service.name)
}

/// Returns a question with the most similar `NAMESPACE/NAME`; empty if no name is similar.
pub fn suggestion(wanted: &ObjectName, all: impl Iterator<Item = String>) -> String {
    let similarity = |full: &str| {
        let (namespace, name) = full.split_once('/').unwrap_or_default();
        let is_elsewhere = wanted
            .namespace
            .as_ref()
            .is_some_and(|wanted| wanted != namespace);
        strsim::normalized_damerau_levenshtein(&wanted.name, name)
            * if is_elsewhere { ELSEWHERE } else { 1.0 }
    };
    let rated = all
        .map(|full| (similarity(&full), full))
        .filter(|(rate, _)| *rate >= SIMILAR);
    let best = rated.max_by(|(a, _), (b, _)| a.total_cmp(b));
    best.map(|(_, full)| format!("; did you mean {full}?"))
        .unwrap_or_default()
}

/// Returns a node's name in the API's form: trimmed, lower case.
pub fn canonical_node_name(name: &str) -> String {
    name.trim().to_lowercase()
}

/// Returns true if the text is a valid object name (RFC 1123).
pub fn is_name(text: &str) -> bool {
    let is_letter = |letter: char| {
        letter.is_ascii_lowercase() || letter.is_ascii_digit() || "-.".contains(letter)
    };
    !text.is_empty() && text.chars().all(is_letter)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_one_form() {
        let name = |namespace: Option<&str>, name: &str| {
            Ok(ServiceName(ObjectName {
                namespace: namespace.map(str::to_owned),
                name: name.to_owned(),
            }))
        };
        let cases = [
            ("web", name(None, "web")),
            ("shop/web", name(Some("shop"), "web")),
            ("svc/web", name(None, "web")),
            ("service/shop/web", name(Some("shop"), "web")),
            // KEP-5311 allows Service names that begin with a digit.
            ("svc/2nd/1-web", name(Some("2nd"), "1-web")),
        ];
        for (text, want) in cases {
            assert_eq!(text.parse::<ServiceName>(), want, "{text}");
        }
        for text in ["", "/", "shop/", "/web", "a/b/c", "Web", "web:80"] {
            assert!(text.parse::<ServiceName>().is_err(), "{text}");
        }
        let within = |text: &str| {
            text.parse::<ServiceName>()
                .unwrap()
                .within(Some("shop"))
                .0
                .to_string()
        };
        assert_eq!(
            [within("web"), within("other/web")],
            ["shop/web", "other/web"]
        );
    }
}
