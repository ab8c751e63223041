//! Reads objects from a folder of YAML and JSON files, for kpx without an API server.
//!
//! An unreadable document affects only itself: its last version stays in use. While the folder is
//! unreadable, everything stays in use without updates.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;
use tokio::sync::mpsc::Sender;
use tokio::task::spawn_blocking;

use self::file::{File, LocatedObject};
use self::folder::{Folder, Listing};
use self::object::{Key, Kind, Object};
use crate::health::{Health, Problem};
use proxy_core::input::{Input, Update};

mod file;
mod folder;
mod object;
mod validate;

/// The maximum size of a file in bytes. An API server accepts 1.5 MiB for one object, and a List of
/// a large cluster has tens of MiB.
const LONGEST: u64 = 64 << 20;

/// The objects in use, in the order in which new objects are sent.
type Objects = BTreeMap<Key, Arc<Object>>;

/// Checks that the folder can be read.
pub(super) fn check(path: &Path) -> anyhow::Result<()> {
    // No inotify watch here, because it would start a thread.
    fs::read_dir(path)
        .map(drop)
        .with_context(|| format!("read folder {}", path.display()))
}

pub(super) async fn run(
    path: PathBuf,
    node_name: Option<String>,
    inputs: Sender<Input>,
    health: Health,
) -> anyhow::Result<()> {
    let mut folder = Folder::new(path.clone());
    let mut listing = folder
        .list()
        .with_context(|| format!("read folder {}", path.display()))?;
    let mut manifests = Manifests {
        path,
        node_name,
        ..Manifests::default()
    };
    let mut sent: Option<Objects> = None;
    let mut reported = BTreeSet::new();
    loop {
        let known = listing.clone();
        let (objects, problems);
        (manifests, (objects, problems)) = spawn_blocking(move || {
            manifests.read(listing);
            let state = manifests.state();
            (manifests, state)
        })
        .await?;
        reported = report(&health, &reported, problems);
        let news = sent
            .as_ref()
            .map_or_else(|| all(&objects), |sent| changes(sent, &objects));
        for input in news {
            if inputs.send(input).await.is_err() {
                return Ok(());
            }
        }
        sent = Some(objects);
        listing = tokio::select! {
            () = inputs.closed() => return Ok(()),
            listing = folder.change(&known, &health) => listing,
        };
    }
}

#[derive(Debug, Default)]
struct Manifests {
    path: PathBuf,
    /// The name of this node's object; `None` to send all Nodes.
    node_name: Option<String>,
    listing: Listing,
    files: BTreeMap<OsString, File>,
}

impl Manifests {
    fn read(&mut self, listing: Listing) {
        self.files.retain(|name, _| listing.contains_key(name));
        for (name, stamp) in &listing {
            if self.listing.get(name) == Some(stamp) {
                continue;
            }
            let before = self.files.remove(name).unwrap_or_default();
            let file = match text_of(&self.path.join(name)) {
                Ok(text) => File::parse(&name.to_string_lossy(), &text, &before),
                Err(why) => File::unreadable(why, &before),
            };
            self.files.insert(name.clone(), file);
        }
        self.listing = listing;
    }

    /// Returns the objects in use, and the problems by place.
    fn state(&self) -> (Objects, BTreeMap<String, String>) {
        let mut placed: BTreeMap<&Key, (String, &LocatedObject)> = BTreeMap::new();
        let mut problems = BTreeMap::new();
        for (name, file) in &self.files {
            for (line, why) in &file.problems {
                note(&mut problems, place(name, *line), why.clone());
            }
            for object in &file.objects {
                let here = place(name, Some(object.line));
                match placed.entry(&object.key) {
                    Entry::Vacant(entry) => drop(entry.insert((here, object))),
                    Entry::Occupied(entry) => {
                        let why = format!(
                            "{}: duplicate of {}, which stays programmed",
                            object.key,
                            entry.get().0
                        );
                        note(&mut problems, here, why);
                    }
                }
            }
        }
        // An object that moved to another file is dropped from the old file.
        for (name, file) in &self.files {
            for object in &file.kept {
                placed
                    .entry(&object.key)
                    .or_insert_with(|| (place(name, Some(object.line)), object));
            }
        }
        let objects = placed
            .into_values()
            .map(|(_, placed)| placed)
            .filter(|placed| placed.object.is_watched(self.node_name.as_deref()));
        (
            objects
                .map(|placed| (placed.key.clone(), Arc::clone(&placed.object)))
                .collect(),
            problems,
        )
    }
}

/// Reads a file of at most [`LONGEST`] bytes, even if it grew since it was listed.
fn text_of(path: &Path) -> Result<String, String> {
    let mut bytes = Vec::new();
    let read = fs::File::open(path).and_then(|file| file.take(LONGEST + 1).read_to_end(&mut bytes));
    read.map_err(|error| error.to_string())?;
    if bytes.len() as u64 > LONGEST {
        return Err(format!(
            "has more than {} MiB: divide it into several files",
            LONGEST >> 20
        ));
    }
    String::from_utf8(bytes).map_err(|_| "is not UTF-8 text".to_owned())
}

/// Formats a place: `web.yaml:14`
fn place(name: &OsStr, line: Option<u64>) -> String {
    let name = name.to_string_lossy();
    line.map_or_else(|| name.to_string(), |line| format!("{name}:{line}"))
}

fn note(problems: &mut BTreeMap<String, String>, place: String, why: String) {
    match problems.entry(place) {
        Entry::Vacant(entry) => drop(entry.insert(why)),
        Entry::Occupied(mut entry) => *entry.get_mut() = format!("{}; {why}", entry.get()),
    }
}

/// Publishes all problems, and ends those of `reported` that are gone.
fn report(
    health: &Health,
    reported: &BTreeSet<String>,
    problems: BTreeMap<String, String>,
) -> BTreeSet<String> {
    for place in reported
        .iter()
        .filter(|place| !problems.contains_key(*place))
    {
        health.end(&Problem::Manifest(place.clone()));
    }
    for (place, why) in &problems {
        health.begin(&Problem::Manifest(place.clone()), why);
    }
    problems.into_keys().collect()
}

fn all(objects: &Objects) -> Vec<Input> {
    let mut cidrs = Vec::new();
    let mut nodes = Vec::new();
    let mut slices = Vec::new();
    let mut services = Vec::new();
    for object in objects.values() {
        match &**object {
            Object::ServiceCidr(cidr) => cidrs.push(cidr.as_ref().clone()),
            Object::Node(node) => nodes.push(node.as_ref().clone()),
            Object::EndpointSlice(slice) => slices.push(slice.as_ref().clone()),
            Object::Service(service) => services.push(service.as_ref().clone()),
        }
    }
    vec![
        Input::ServiceCidr(Update::All(cidrs)),
        Input::Node(Update::All(nodes)),
        Update::All(slices).into(),
        Update::All(services).into(),
    ]
}

/// Returns the changes, with new and changed objects before deleted objects: a Service that moves
/// to other EndpointSlices always has some.
fn changes(old: &Objects, new: &Objects) -> Vec<Input> {
    let put = new
        .iter()
        .filter(|(key, object)| old.get(key) != Some(object))
        .map(|(_, object)| put(object));
    let del = old
        .keys()
        .rev()
        .filter(|key| !new.contains_key(key))
        .map(del);
    put.chain(del).collect()
}

fn put(object: &Object) -> Input {
    match object {
        Object::ServiceCidr(object) => Input::ServiceCidr(Update::Put(object.clone())),
        Object::Node(object) => Input::Node(Update::Put(object.clone())),
        Object::EndpointSlice(object) => Update::Put(object.clone()).into(),
        Object::Service(object) => Update::Put(object.clone()).into(),
    }
}

fn del(key: &Key) -> Input {
    let name = key.name.clone();
    match key.kind {
        Kind::ServiceCidr => Input::ServiceCidr(Update::Del(name)),
        Kind::Node => Input::Node(Update::Del(name)),
        Kind::EndpointSlice => Input::EndpointSlice(Update::Del(name)),
        Kind::Service => Input::Service(Update::Del(name)),
    }
}

#[cfg(test)]
mod tests;
