//! Parses events and their objects. An object of the wrong shape breaks neither its list nor its
//! watch.

use kube::Resource as _;
use kube::core::{PartialObjectMeta, Status};
use serde::de::Error;
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use crate::needed::read;
use proxy_core::compact::{Compact, MARK, NAMED};
use proxy_core::input::ObjectName;

/// The annotation of the bookmark at the end of a streaming list.
const LISTED: &str = "k8s.io/initial-events-end";

/// A line of a watch.
#[derive(Debug)]
pub(super) enum Event<K> {
    Put(ParsedObject<K>),
    Gone(ParsedObject<K>),
    /// A resource version up to which everything was sent.
    Bookmark(String),
    /// A resource version at which all initial objects were sent.
    Listed(String),
    Error(Box<Status>),
}

#[derive(Deserialize)]
struct Line<'a> {
    r#type: &'a str,
    #[serde(borrow)]
    object: &'a RawValue,
}

impl<K: Compact> Event<K> {
    /// Parses a line. Returns `None` for a truncated line, as at the end of a broken connection.
    pub(super) fn read(line: &str) -> serde_json::Result<Option<Self>> {
        let Line { r#type, object } = match serde_json::from_str(line) {
            Ok(line) => line,
            Err(error) if error.is_eof() => return Ok(None),
            Err(error) => return Err(error),
        };
        let object = object.get();
        Ok(Some(match r#type {
            "ADDED" | "MODIFIED" => Self::Put(ParsedObject::read(object)?),
            "DELETED" => Self::Gone(ParsedObject::read(object)?),
            "BOOKMARK" => {
                let mark: PartialObjectMeta =
                    read(object, MARK).map_err(serde_json::Error::custom)?;
                let version = mark.metadata.resource_version.unwrap_or_default();
                let annotations = mark.metadata.annotations.unwrap_or_default();
                if annotations.contains_key(LISTED) {
                    Self::Listed(version)
                } else {
                    Self::Bookmark(version)
                }
            }
            "ERROR" => Self::Error(serde_json::from_str(object)?),
            other => {
                return Err(serde_json::Error::custom(format!(
                    "an event of type {other}"
                )));
            }
        }))
    }
}

/// An object in compact form, or the name and version of an unreadable object.
#[derive(Clone, Debug)]
pub(crate) struct ParsedObject<K> {
    pub(crate) name: ObjectName,
    pub(super) uid: String,
    pub(super) version: String,
    /// The object, or the reason why it cannot be read.
    pub(crate) object: Result<K, String>,
}

#[derive(Deserialize)]
pub(super) struct List<T> {
    #[serde(default)]
    metadata: Option<ListMetadata>,
    items: Option<Vec<T>>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ListMetadata {
    resource_version: Option<String>,
    r#continue: Option<String>,
}

impl<T> List<T> {
    /// Returns the items, the version, and the token for the next page.
    pub(super) fn parts(self) -> (Vec<T>, String, Option<String>) {
        let ListMetadata {
            resource_version,
            r#continue,
        } = self.metadata.unwrap_or_default();
        let more = r#continue.filter(|token| !token.is_empty());
        (
            self.items.unwrap_or_default(),
            resource_version.unwrap_or_default(),
            more,
        )
    }
}

impl<K: Compact> ParsedObject<K> {
    fn read(text: &str) -> serde_json::Result<Self> {
        Ok(match read::<K::Object>(text, K::NEEDED) {
            Ok(object) => Self {
                name: ObjectName::from(object.meta()),
                uid: object.meta().uid.clone().unwrap_or_default(),
                version: object.meta().resource_version.clone().unwrap_or_default(),
                object: Ok(K::compact(object)),
            },
            Err(error) => {
                let object: PartialObjectMeta =
                    read(text, NAMED).map_err(serde_json::Error::custom)?;
                let metadata = object.metadata;
                Self {
                    name: ObjectName::from(&metadata),
                    uid: metadata.uid.unwrap_or_default(),
                    version: metadata.resource_version.unwrap_or_default(),
                    object: Err(error.to_string()),
                }
            }
        })
    }
}

/// Deserializes from a slice of JSON text only.
impl<'de, K: Compact> Deserialize<'de> for ParsedObject<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::read(<&RawValue>::deserialize(deserializer)?.get()).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proxy_core::compact::Service;

    #[test]
    fn a_bad_object_costs_only_itself() {
        let text = r#"{"metadata": {"resourceVersion": "7"}, "items": [{"metadata": {"name": "good"}},
            {"metadata": {"namespace": "default", "name": "bad"}, "spec": {"ports": "eighty"}}]}"#;
        let (items, version, more) = serde_json::from_str::<List<ParsedObject<Service>>>(text)
            .unwrap()
            .parts();
        assert_eq!((version.as_str(), more), ("7", None));
        assert!(items[0].object.is_ok());
        assert_eq!(items[1].name, ObjectName::new("default", "bad"));
        let why = items[1].object.as_ref().unwrap_err();
        assert_eq!(
            why,
            "spec.ports: invalid type: string \"eighty\", expected a sequence"
        );

        let line = r#"{"object": {"metadata": {"name": "bad"}, "spec": 8}, "type": "ADDED"}"#;
        let event: Option<Event<Service>> = Event::read(line).unwrap();
        assert!(matches!(
            event,
            Some(Event::Put(ParsedObject { object: Err(_), .. }))
        ));
        assert!(
            Event::<Service>::read(&line[..40]).unwrap().is_none(),
            "cut off"
        );
        assert!(Event::<Service>::read("nonsense").is_err());
    }
}
