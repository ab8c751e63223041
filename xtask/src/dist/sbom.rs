//! Writes the software bill of materials: the crates that are linked into kpx and its kernel
//! programs, as CycloneDX.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result};
use jiff::Timestamp;
use serde_json::{Value, json};

/// The packages that a release is built from: kpx, and the kernel programs in it.
const ROOTS: [&str; 2] = ["proxy-agent", "proxy-ebpf"];

/// The packages of `cargo metadata` that are in a release, by their ids.
pub(super) struct Linked<'a> {
    pub(super) packages: BTreeMap<&'a str, &'a Value>,
    edges: BTreeMap<&'a str, Vec<&'a str>>,
    roots: [&'a str; 2],
}

impl<'a> Linked<'a> {
    pub(super) fn of(metadata: &'a Value) -> Result<Self> {
        let mut packages: BTreeMap<&str, &Value> = list(&metadata["packages"])
            .filter_map(|package| Some((package["id"].as_str()?, package)))
            .collect();
        let edges: BTreeMap<&str, Vec<&str>> = list(&metadata["resolve"]["nodes"])
            .filter_map(|node| Some((node["id"].as_str()?, linked(node))))
            .collect();
        let named = |name: &str| {
            packages
                .iter()
                .find(|(_, package)| package["name"] == name)
                .map(|(id, _)| *id)
        };
        let [agent, programs] =
            ROOTS.map(|name| named(name).with_context(|| format!("no package {name}")));
        let roots = [agent?, programs?];
        let all = reached(&roots, &edges);
        packages.retain(|id, _| all.contains(id));
        Ok(Self {
            packages,
            edges,
            roots,
        })
    }
}

/// Returns the bill of what `cargo metadata` and `Cargo.lock` say. `time` is in seconds since 1970.
pub(super) fn cyclonedx(metadata: &Value, lock: &str, version: &str, time: u64) -> Result<Value> {
    let Linked {
        packages,
        edges,
        roots,
    } = Linked::of(metadata)?;
    let sums = checksums(lock);
    let kpx = format!("pkg:generic/kpx@{version}");
    let components: Vec<_> = packages.values().map(|one| component(one, &sums)).collect();
    let purls = |ids: &[&str]| -> Vec<String> {
        ids.iter()
            .filter_map(|id| packages.get(id))
            .map(|one| purl(one))
            .collect()
    };
    let depends = |of: &str, on: &[&str]| json!({ "ref": of, "dependsOn": purls(on) });
    let own = [depends(&kpx, &roots)];
    let others = packages
        .iter()
        .filter_map(|(id, one)| Some(depends(&purl(one), edges.get(id)?)));
    Ok(json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "timestamp": Timestamp::from_second(time.try_into()?)?.to_string(),
            "component": {
                "type": "application", "bom-ref": kpx, "name": "kpx", "version": version, "purl": kpx,
                "licenses": [{ "expression": env!("CARGO_PKG_LICENSE") }],
            },
        },
        "components": components,
        "dependencies": own.into_iter().chain(others).collect::<Vec<_>>(),
    }))
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// Returns what a package is linked with. What only builds or tests it is not in the program.
fn linked(node: &Value) -> Vec<&str> {
    let is_linked =
        |dependency: &&Value| list(&dependency["dep_kinds"]).any(|kind| kind["kind"].is_null());
    list(&node["deps"])
        .filter(is_linked)
        .filter_map(|dependency| dependency["pkg"].as_str())
        .collect()
}

fn reached<'a>(roots: &[&'a str], edges: &BTreeMap<&'a str, Vec<&'a str>>) -> BTreeSet<&'a str> {
    let mut all = BTreeSet::new();
    let mut open = roots.to_vec();
    while let Some(id) = open.pop() {
        if all.insert(id) {
            open.extend(edges.get(id).into_iter().flatten());
        }
    }
    all
}

fn component(package: &Value, sums: &BTreeMap<(String, String), String>) -> Value {
    let name = package["name"].clone();
    let version = package["version"].clone();
    let purl = purl(package);
    let mut component = json!({ "type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl });
    if let Some(license) = package["license"].as_str() {
        // Some crates write a slash for OR.
        component["licenses"] = json!([{ "expression": license.replace('/', " OR ") }]);
    }
    if let Some(url) = package["repository"].as_str() {
        component["externalReferences"] = json!([{ "type": "vcs", "url": url }]);
    }
    let key = [&name, &version].map(|text| text.as_str().unwrap_or_default().to_owned());
    if let Some(sum) = sums.get(&key.into()) {
        component["hashes"] = json!([{ "alg": "SHA-256", "content": sum }]);
    }
    component
}

fn purl(package: &Value) -> String {
    let text = |field: &str| package[field].as_str().unwrap_or_default().to_owned();
    format!("pkg:cargo/{}@{}", text("name"), text("version"))
}

/// Reads the checksums of `Cargo.lock`, by name and version.
fn checksums(lock: &str) -> BTreeMap<(String, String), String> {
    let packages = lock.split("[[package]]").skip(1).filter_map(|package| {
        let field = |name: &str| {
            let line = package
                .lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(" = \""));
            line.map(|value| value.trim_end_matches('"').to_owned())
        };
        Some(((field("name")?, field("version")?), field("checksum")?))
    });
    packages.collect()
}
