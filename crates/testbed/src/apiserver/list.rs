//! Lists, complete or paged.

use std::sync::Arc;

use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD as BASE64;
use serde_json::{Value, json};

use super::failure::{Failure, Outcome};
use super::kinds::Kind;
use super::options::ListOptions;
use super::store::{Key, Store};
use super::view::View;

/// Answers a list. All pages show the state at the first page.
pub(crate) fn list(
    store: &Store,
    kind: &Kind,
    namespace: &str,
    options: &ListOptions,
    view: View,
) -> Outcome<Value> {
    let now = store.version();
    let (version, after) = match (&options.token, options.version) {
        (Some(token), _) => position(kind, token)?,
        (None, Some(version)) if version > now => {
            return Err(Failure::version_too_large(version, now));
        }
        (None, Some(version)) if version > 0 && options.exact => (version, None),
        (None, _) => (now, None),
    };
    let objects: Vec<(Key, Arc<Value>)> = if version == now {
        store
            .objects(kind, namespace)
            .map(|(key, object)| (key.clone(), object.clone()))
            .collect()
    } else {
        let too_old = || {
            Failure::expired(match &options.token {
                Some(_) => {
                    "The provided continue parameter is too old to display a consistent list result. \
                     You must start a new list without the continue parameter."
                }
                None => "The resourceVersion for the provided list is too old.",
            })
        };
        store
            .objects_at(kind, namespace, version)
            .ok_or_else(too_old)?
            .into_iter()
            .collect()
    };
    let rest = objects.iter().filter(|(key, object)| {
        after.as_ref().is_none_or(|after| key > after) && options.selector.matches(object)
    });
    let (page, left): (Vec<_>, _) = match options.limit {
        0 => (rest.collect(), 0),
        limit => {
            let mut rest = rest;
            (rest.by_ref().take(limit).collect(), rest.count())
        }
    };
    let mut metadata = json!({"resourceVersion": version.to_string()});
    if let Some((last, _)) = page.last().filter(|_| left > 0) {
        metadata["continue"] = json!(token(version, last));
        if options.selector.is_everything() {
            metadata["remainingItemCount"] = json!(left);
        }
    }
    Ok(view.list(
        kind,
        page.into_iter().map(|(_, object)| &**object),
        metadata,
    ))
}

/// Returns the continue token: the version and the last key.
fn token(version: u64, last: &Key) -> String {
    BASE64.encode(json!([version, last.namespace, last.name]).to_string())
}

fn position(kind: &Kind, token: &str) -> Outcome<(u64, Option<Key>)> {
    let unreadable = || Failure::bad_request("invalid continue token: continue key is not valid");
    let text = BASE64.decode(token).map_err(|_| unreadable())?;
    let (version, namespace, name): (u64, String, String) =
        serde_json::from_slice(&text).map_err(|_| unreadable())?;
    Ok((version, Some(Key::new(kind, &namespace, &name))))
}
