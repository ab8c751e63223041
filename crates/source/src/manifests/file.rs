//! Parses one file, and keeps the last readable objects of an unreadable file.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde_json::Value;
use tracing::info;

use super::object::{self, Key, Object, Refused};
use crate::document::{Document, documents};

#[derive(Debug, Default)]
pub(super) struct File {
    pub(super) objects: Vec<LocatedObject>,
    /// Earlier objects of a file whose unreadable documents may still contain them.
    pub(super) kept: Vec<LocatedObject>,
    /// The problems with their lines; `None` for a problem of the whole file.
    pub(super) problems: Vec<(Option<u64>, String)>,
}

#[derive(Clone, Debug)]
pub(super) struct LocatedObject {
    pub(super) line: u64,
    pub(super) key: Key,
    pub(super) object: Arc<Object>,
}

/// A document, or an item of a List, with an error or a likely mistake.
struct Fault {
    line: Option<u64>,
    /// The object's key; `None` if the document may hold any object.
    key: Option<Key>,
    why: String,
}

impl File {
    /// Parses a file; `name` is for the log.
    pub(super) fn parse(name: &str, text: &str, before: &Self) -> Self {
        let mut objects = Vec::new();
        let mut bad = Vec::new();
        for (number, document) in documents(text).enumerate() {
            let subject = format!("document {}", number + 1);
            match document {
                Ok(document) => read(name, &subject, &document, &mut objects, &mut bad),
                Err(error) => bad.push(Fault {
                    line: Some(error.line),
                    key: None,
                    why: format!("{subject}: {}", error.why),
                }),
            }
        }
        Self::new(objects, bad, before)
    }

    pub(super) fn unreadable(why: String, before: &Self) -> Self {
        Self::new(
            Vec::new(),
            vec![Fault {
                line: None,
                key: None,
                why,
            }],
            before,
        )
    }

    fn new(objects: Vec<LocatedObject>, bad: Vec<Fault>, before: &Self) -> Self {
        let given: BTreeSet<_> = objects.iter().map(|placed| &placed.key).collect();
        let hidden = |key: &Key| {
            bad.iter()
                .any(|bad| bad.key.as_ref().is_none_or(|bad| bad == key))
        };
        let lost = |placed: &&LocatedObject| !given.contains(&placed.key) && hidden(&placed.key);
        let kept = before
            .objects
            .iter()
            .chain(&before.kept)
            .filter(lost)
            .cloned()
            .collect();
        Self {
            kept,
            problems: bad.into_iter().map(|bad| (bad.line, bad.why)).collect(),
            objects,
        }
    }
}

fn read(
    file: &str,
    subject: &str,
    document: &Document,
    objects: &mut Vec<LocatedObject>,
    bad: &mut Vec<Fault>,
) {
    let items = match document.value() {
        Value::Null => return,
        value => object::items(value),
    };
    let mut fault =
        |place: &str, subject: String, key: Option<Key>, Refused { field, why }: Refused| {
            let line = Some(document.line(&format!("{place}.{field}")));
            bad.push(Fault {
                line,
                key,
                why: format!("{subject}: {why}"),
            });
        };
    let items = match items {
        Ok(items) => items,
        Err(error) => return fault("", subject.to_owned(), None, error),
    };
    for (place, value) in items {
        let line = document.line(&place);
        let subject = || match place.as_str() {
            "" => subject.to_owned(),
            place => format!("{subject}: {place}"),
        };
        match object::kind(&value) {
            Ok(Some(kind)) => {
                let problem = match (
                    object::decode(kind, &value),
                    object::unknown_fields(kind, &value),
                ) {
                    (Ok((key, object)), unknown) => {
                        objects.push(LocatedObject {
                            line,
                            key,
                            object: Arc::new(object),
                        });
                        unknown.map(|unknown| unknown.said("left out"))
                    }
                    // The unknown field is the likely cause.
                    (Err(_), Some(unknown)) => Some(unknown.said("strict decoding error")),
                    (Err(error), None) => Some(error),
                };
                if let Some(problem) = problem {
                    let key = object::key(kind, &value);
                    fault(
                        &place,
                        key.as_ref().map_or_else(subject, Key::to_string),
                        key,
                        problem,
                    );
                }
            }
            Ok(None) => info!(
                file,
                line,
                kind = value["kind"].as_str(),
                "ignored, as kpx does not read this kind"
            ),
            Err(error) => fault(
                &place,
                object::title(&value).unwrap_or_else(subject),
                None,
                error,
            ),
        }
    }
}
