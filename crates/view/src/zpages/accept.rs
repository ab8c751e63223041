//! Chooses the form of a page by the header `Accept`, as the API server does.

use http::HeaderMap;
use http::header::ACCEPT;

pub(super) const GROUP: &str = "config.k8s.io";
/// The version that is not deprecated.
pub(super) const NEWEST: &str = "v1beta1";
/// The versions of the structured forms, which have the same fields.
const VERSIONS: [&str; 2] = [NEWEST, "v1alpha1"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    Text,
    Structured(Structure),
}

/// A form for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Structure {
    pub(super) syntax: Syntax,
    pub(super) version: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Syntax {
    Json,
    Yaml,
}

impl Structure {
    pub(super) fn media_type(self, kind: &str) -> String {
        let syntax = match self.syntax {
            Syntax::Json => "json",
            Syntax::Yaml => "yaml",
        };
        format!(
            "application/{syntax};g={GROUP};v={};as={kind}",
            self.version
        )
    }
}

/// Returns the form of a page that a client prefers; None if the client takes none of the forms. A
/// client that asks for nothing gets text.
pub(super) fn form(headers: &HeaderMap, kind: &str) -> Option<Form> {
    let lines = headers
        .get_all(ACCEPT)
        .iter()
        .filter_map(|line| line.to_str().ok());
    let asked: Vec<_> = lines
        .flat_map(|line| line.split(','))
        .map(str::trim)
        .filter(|one| !one.is_empty())
        .collect();
    if asked.is_empty() {
        return Some(Form::Text);
    }
    let mut ranges: Vec<_> = asked
        .into_iter()
        .filter_map(Range::parse)
        .filter(|range| range.weight > 0.0)
        .collect();
    // The client's own order decides among equals.
    ranges.sort_by(|one, other| {
        other
            .weight
            .total_cmp(&one.weight)
            .then(one.wildcards().cmp(&other.wildcards()))
    });
    ranges.iter().find_map(|range| range.form(kind))
}

/// A media range, with the object that a client wants in it.
#[derive(Default)]
struct Range<'a> {
    main: &'a str,
    sub: &'a str,
    weight: f32,
    group: Option<&'a str>,
    version: Option<&'a str>,
    kind: Option<&'a str>,
}

impl<'a> Range<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        let mut parts = text.split(';').map(str::trim);
        let (main, sub) = parts.next()?.split_once('/')?;
        let mut range = Self {
            main,
            sub,
            weight: 1.0,
            ..Self::default()
        };
        for (name, value) in parts.filter_map(|part| part.split_once('=')) {
            match name {
                "q" => range.weight = value.parse().ok()?,
                "g" => range.group = Some(value),
                "v" => range.version = Some(value),
                "as" => range.kind = Some(value),
                _ => {}
            }
        }
        Some(range)
    }

    fn wildcards(&self) -> usize {
        [self.main, self.sub]
            .into_iter()
            .filter(|part| *part == "*")
            .count()
    }

    fn covers(&self, main: &str, sub: &str) -> bool {
        let fits = |range: &str, part: &str| range == "*" || range.eq_ignore_ascii_case(part);
        fits(self.main, main) && fits(self.sub, sub)
    }

    fn form(&self, kind: &str) -> Option<Form> {
        let syntaxes = [("json", Syntax::Json), ("yaml", Syntax::Yaml)];
        match (self.group, self.version, self.kind) {
            (None, None, None) => self.covers("text", "plain").then_some(Form::Text),
            (Some(GROUP), Some(version), Some(of)) if of == kind => {
                let version = VERSIONS.into_iter().find(|known| *known == version)?;
                let (_, syntax) = syntaxes
                    .into_iter()
                    .find(|(name, _)| self.covers("application", name))?;
                Some(Form::Structured(Structure { syntax, version }))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(accept: &str) -> Option<Form> {
        let headers = HeaderMap::from_iter([(ACCEPT, accept.parse().unwrap())]);
        form(&headers, "Statusz")
    }

    #[test]
    fn client_gets_text_unless_it_asks_for_more() {
        assert_eq!(form(&HeaderMap::new(), "Statusz"), Some(Form::Text));
        for accept in [
            "",
            "*/*",
            "text/plain",
            "text/*;q=0.1",
            "Text/Plain; charset=utf-8",
            "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8",
            "application/json;v=v9;g=config.k8s.io;as=Statusz, */*",
            "application/json, text/plain;q=0.5",
        ] {
            assert_eq!(chosen(accept), Some(Form::Text), "{accept}");
        }
    }

    #[test]
    fn client_has_to_name_the_whole_object() {
        for accept in [
            "application/json",
            "application/*",
            "application/json;v=v1beta1;g=config.k8s.io",
            "application/json;v=v1beta1;as=Statusz",
            "application/json;g=config.k8s.io;as=Statusz",
            "application/json;v=v1beta1;g=config.k8s.io;as=Flagz",
            "application/json;v=v1beta1;g=apps;as=Statusz",
            "application/json;v=v1beta2;g=config.k8s.io;as=Statusz",
            "application/cbor;v=v1beta1;g=config.k8s.io;as=Statusz",
            "text/plain;v=v1beta1;g=config.k8s.io;as=Statusz",
            "application/xml",
            "text/plain;q=0",
            "text/plain;q=much",
            "plain",
        ] {
            assert_eq!(chosen(accept), None, "{accept}");
        }
    }

    #[test]
    fn client_prefers_by_weight_and_then_by_order() {
        let structured = |syntax, version| Some(Form::Structured(Structure { syntax, version }));
        let [alpha, beta] = ["v1alpha1", "v1beta1"]
            .map(|v| format!("application/json;v={v};g=config.k8s.io;as=Statusz"));
        let yaml = beta.replace("json", "yaml");
        for (accept, want) in [
            (alpha.clone(), structured(Syntax::Json, "v1alpha1")),
            (beta.clone(), structured(Syntax::Json, "v1beta1")),
            (
                format!("{alpha},{beta}"),
                structured(Syntax::Json, "v1alpha1"),
            ),
            (
                format!("{beta},{alpha}"),
                structured(Syntax::Json, "v1beta1"),
            ),
            (
                format!("{alpha};q=0.3,{yaml};q=0.4,text/plain;q=0.2"),
                structured(Syntax::Yaml, "v1beta1"),
            ),
            (format!("*/*,{yaml}"), structured(Syntax::Yaml, "v1beta1")),
            (
                beta.replace("application/json", "*/*"),
                structured(Syntax::Json, "v1beta1"),
            ),
        ] {
            assert_eq!(chosen(&accept), want, "{accept}");
        }
    }
}
