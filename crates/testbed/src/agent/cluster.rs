//! Keeps a lab's objects for its agents: behind an API server, or in a folder.

use std::fs;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::objects::{Object, node};
use crate::apiserver::{ApiServer, Container, Options};
use crate::lab::{Family, Lab, SERVICE_CIDR};
use crate::netns::connect_in;

/// Starts an API server in the lab's fabric, at the address that the nodes use, with the lab's Node
/// objects. Its certificate includes `sans`.
pub fn api_server(lab: &Lab, sans: Vec<String>) -> Result<ApiServer> {
    api_server_at(lab, 6443, sans)
}

/// Starts an API server like [`api_server`], at another port.
pub fn api_server_at(lab: &Lab, port: u16, sans: Vec<String>) -> Result<ApiServer> {
    let addr = SocketAddr::new(lab.fabric.addrs.ip(Family::V4), port);
    let listener = lab
        .fabric
        .ns
        .run(|| TcpListener::bind(addr))
        .with_context(|| format!("listen on {addr}"))?;
    let service_cidrs = Family::ALL
        .map(|family| SERVICE_CIDR.cidr(family).parse().expect("a CIDR"))
        .to_vec();
    let server = ApiServer::start(Options {
        service_cidrs,
        sans,
        ..Options::on(listener)
    })?;
    lab.nodes()
        .into_iter()
        .try_for_each(|n| server.apply(&node(n).0).map(drop))?;
    Ok(server)
}

/// The objects of a lab's cluster, initially the lab's Node objects.
#[derive(Debug)]
pub struct Cluster {
    keeper: Keeper,
    path: PathBuf,
}

/// The agent's source of objects.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    Manifests(&'a Path),
    Kubeconfig(&'a Path),
}

#[derive(Debug)]
enum Keeper {
    Api(Box<ApiServer>),
    Folder,
}

impl Cluster {
    /// Keeps the objects in an API server in the lab's fabric, at the address that the nodes use.
    pub fn with_api_server(lab: &Lab) -> Result<Self> {
        let server = api_server(lab, Vec::new())?;
        let path = lab.dir().join("kubeconfig");
        server.kubeconfig(&path)?;
        Ok(Self {
            keeper: Keeper::Api(Box::new(server)),
            path,
        })
    }

    /// Keeps the objects in a folder of manifests.
    pub fn with_manifests(lab: &Lab) -> Result<Self> {
        let path = lab.dir().join("manifests");
        fs::create_dir(&path).with_context(|| format!("create {}", path.display()))?;
        let cluster = Self {
            keeper: Keeper::Folder,
            path,
        };
        lab.nodes()
            .into_iter()
            .try_for_each(|n| cluster.put(&node(n)))?;
        Ok(cluster)
    }

    pub fn source(&self) -> Source<'_> {
        match self.keeper {
            Keeper::Api(_) => Source::Kubeconfig(&self.path),
            Keeper::Folder => Source::Manifests(&self.path),
        }
    }

    /// Returns the API server, to enable faults.
    pub fn server(&mut self) -> Result<&mut ApiServer> {
        match &mut self.keeper {
            Keeper::Api(server) => Ok(server),
            Keeper::Folder => bail!("a folder of manifests has no API server"),
        }
    }

    /// Makes the API server reach the ports of these hosts as pods of the namespace `default`.
    pub fn reach(&self, lab: &Lab, hosts: &[&str]) -> Result<()> {
        let Keeper::Api(server) = &self.keeper else {
            bail!("a folder of manifests has no API server")
        };
        for host in hosts.iter().map(|name| lab.host(name)) {
            let pod = LabPod {
                namespace: format!("/run/netns/{}", host.ns.name()),
                ip: host.addrs.ip(Family::V4),
            };
            server.reach("default", host.name, Arc::new(pod));
        }
        Ok(())
    }

    /// Returns the API server, to read it or to enable faults.
    pub fn api_server(&self) -> Result<&ApiServer> {
        match &self.keeper {
            Keeper::Api(server) => Ok(server),
            Keeper::Folder => bail!("a folder of manifests has no API server"),
        }
    }

    /// Creates or replaces an object.
    pub fn put(&self, object: &Object) -> Result<()> {
        match &self.keeper {
            Keeper::Api(server) => server.apply(&object.0).map(drop),
            Keeper::Folder => write_whole(&self.file(object), &serde_saphyr::to_string(&object.0)?),
        }
    }

    /// Stores an object with its own uid, where a server would assign one.
    pub fn put_as_is(&self, object: &Object) -> Result<()> {
        match &self.keeper {
            Keeper::Api(server) => server.apply_as_is(&object.0),
            Keeper::Folder => self.put(object),
        }
    }

    pub fn delete(&self, object: &Object) -> Result<()> {
        match &self.keeper {
            Keeper::Api(server) => {
                let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
                let [kind, namespace, name] = ["/kind", "/metadata/namespace", "/metadata/name"]
                    .map(|at| object.0.pointer(at).map_or_else(String::new, text));
                server.delete(&kind, &namespace, &name)
            }
            Keeper::Folder => {
                let path = self.file(object);
                fs::remove_file(&path).with_context(|| format!("remove {}", path.display()))
            }
        }
    }

    fn file(&self, object: &Object) -> PathBuf {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_lowercase();
        let [kind, name] = [&object.0["kind"], &object.0["metadata"]["name"]].map(text);
        self.path.join(format!("{kind}-{name}.yaml"))
    }
}

/// A pod of the lab, for the API server's kubelet part.
#[derive(Debug)]
struct LabPod {
    /// The path of its network namespace.
    namespace: String,
    /// The address of its server. A kubelet connects to `localhost`, where the lab's servers do not
    /// listen.
    ip: IpAddr,
}

impl Container for LabPod {
    fn exec(&self, _: &[String]) -> Result<Child> {
        bail!("a pod of the lab has no container")
    }

    fn log(&self) -> Result<String> {
        bail!("a pod of the lab has no container")
    }

    fn connect(&self, port: u16) -> Result<TcpStream> {
        connect_in(&self.namespace, (self.ip, port).into())
    }
}

/// Writes by rename, so that no reader sees a partial file.
fn write_whole(path: &Path, text: &str) -> Result<()> {
    let hidden = path.with_extension("new");
    fs::write(&hidden, text).with_context(|| format!("write {}", hidden.display()))?;
    fs::rename(&hidden, path).with_context(|| format!("rename to {}", path.display()))
}
