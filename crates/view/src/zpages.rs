//! The pages `/statusz` (KEP-4827) and `/flagz` (KEP-4828), as Kubernetes' components have them.

mod accept;
mod flagz;
mod statusz;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use http::header::{CONTENT_TYPE, WARNING, X_CONTENT_TYPE_OPTIONS};
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};
use jiff::Timestamp;
use serde::Serialize;
use serde_json::{Value, json};

use crate::output;
use accept::{Form, GROUP, NEWEST, Structure, Syntax};
use flagz::Flagz;
use statusz::Statusz;

/// The name under which kpx answers.
const COMPONENT: &str = "kpx";

/// The facts of a configuration that the pages tell. A feature gate that is off leaves None.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Told {
    /// The version of Kubernetes that kpx follows, for `/statusz`.
    pub kubernetes_version: Option<String>,
    /// The flags in force by their names, for `/flagz`.
    pub flags: Option<BTreeMap<&'static str, Value>>,
}

/// A page that is served.
#[derive(Clone, Debug)]
pub struct Page {
    pub path: &'static str,
    /// The name of the structured form.
    kind: &'static str,
    content: Content,
}

#[derive(Clone, Debug)]
enum Content {
    Statusz(Statusz),
    Flagz(Flagz),
}

/// A structured answer.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Object<T> {
    kind: &'static str,
    api_version: String,
    metadata: Metadata,
    #[serde(flatten)]
    content: T,
}

#[derive(Serialize)]
struct Metadata {
    name: &'static str,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    annotations: BTreeMap<&'static str, &'static str>,
}

impl Told {
    /// Returns the pages of a process that has started now. `paths` are the others of its address.
    pub fn pages(&self, paths: &[&'static str]) -> Vec<Page> {
        let flagz = self
            .flags
            .as_ref()
            .map(|flags| Page::new("/flagz", "Flagz", Content::Flagz(Flagz::new(flags))));
        let mut paths: Vec<_> = paths
            .iter()
            .copied()
            .chain(flagz.iter().map(|page| page.path))
            .collect();
        paths.sort_unstable();
        let statusz = self
            .kubernetes_version
            .clone()
            .map(|version| Statusz::new(version, paths, Timestamp::now()));
        let statusz =
            statusz.map(|statusz| Page::new("/statusz", "Statusz", Content::Statusz(statusz)));
        statusz.into_iter().chain(flagz).collect()
    }
}

impl Page {
    fn new(path: &'static str, kind: &'static str, content: Content) -> Self {
        Self {
            path,
            kind,
            content,
        }
    }

    /// Answers in the form that the header `Accept` asks for.
    pub fn answer(&self, headers: &HeaderMap, now: Timestamp) -> Response<String> {
        match accept::form(headers, self.kind) {
            Some(Form::Text) => {
                response(StatusCode::OK, "text/plain; charset=utf-8", self.text(now))
            }
            Some(Form::Structured(structure)) => self.structured(structure, now),
            None => refusal(StatusCode::NOT_ACCEPTABLE, "NotAcceptable", &self.forms()),
        }
    }

    fn text(&self, now: Timestamp) -> String {
        let lines = match &self.content {
            Content::Statusz(statusz) => statusz.text(now),
            Content::Flagz(flagz) => flagz.text(),
        };
        let page = &self.path[1..];
        let form = self.newest_form();
        format!(
            "{COMPONENT} {page}\nWarning: this text is for people, and may change. For programs: -H 'Accept: {form}'\n\n{lines}"
        )
    }

    fn structured(&self, structure: Structure, now: Timestamp) -> Response<String> {
        let Structure { syntax, version } = structure;
        let text = match &self.content {
            Content::Statusz(statusz) => {
                syntax.write(&self.object(version, statusz.annotations(), statusz.data(now)))
            }
            Content::Flagz(flagz) => syntax.write(&self.object(version, BTreeMap::new(), flagz)),
        };
        let Ok(text) = text else {
            return refusal(
                StatusCode::INTERNAL_SERVER_ERROR,
                "InternalError",
                "the page cannot be written",
            );
        };
        let mut response = response(StatusCode::OK, &structure.media_type(self.kind), text);
        if version != NEWEST {
            let why = format!(
                "299 - \"{GROUP}/{version} is deprecated, and {GROUP}/{NEWEST} takes its place\""
            );
            put(&mut response, WARNING, &why);
        }
        response
    }

    fn object<T>(
        &self,
        version: &str,
        annotations: BTreeMap<&'static str, &'static str>,
        content: T,
    ) -> Object<T> {
        let metadata = Metadata {
            name: COMPONENT,
            annotations,
        };
        Object {
            kind: self.kind,
            api_version: format!("{GROUP}/{version}"),
            metadata,
            content,
        }
    }

    /// Returns the media type of the form that programs should ask for.
    fn newest_form(&self) -> String {
        Structure {
            syntax: Syntax::Json,
            version: NEWEST,
        }
        .media_type(self.kind)
    }

    /// Returns what a client may ask for.
    fn forms(&self) -> String {
        let yaml = Structure {
            syntax: Syntax::Yaml,
            version: NEWEST,
        }
        .media_type(self.kind);
        format!(
            "{} is served as text/plain, {} or {yaml}",
            self.path,
            self.newest_form()
        )
    }
}

/// Returns an answer as the API server's clients read errors.
fn refusal(code: StatusCode, reason: &str, message: &str) -> Response<String> {
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message, "reason": reason, "code": code.as_u16(),
    });
    response(code, "application/json", format!("{status:#}\n"))
}

fn response(code: StatusCode, content_type: &str, body: String) -> Response<String> {
    let mut response = Response::new(body);
    *response.status_mut() = code;
    put(&mut response, CONTENT_TYPE, content_type);
    put(&mut response, X_CONTENT_TYPE_OPTIONS, "nosniff");
    response
}

/// Sets a header. All values are visible letters of ASCII, which a header takes.
fn put(response: &mut Response<String>, name: HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        response.headers_mut().insert(name, value);
    }
}

impl Syntax {
    fn write<T: Serialize>(self, data: &T) -> anyhow::Result<String> {
        match self {
            Self::Json => output::json(data),
            Self::Yaml => output::yaml(data),
        }
    }
}
