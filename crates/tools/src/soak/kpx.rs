//! The kpx under load: a process of the node, or a pod's container.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{Container, HostPathVolumeSource, PodSpec, Volume, VolumeMount};
use nix::unistd::Pid;
use serde_json::Value;

use super::Place;
use testbed::agent::{Agent, Source};
use testbed::apiserver::ApiServer;
use testbed::lab::Lab;
use testbed::pod::{Running, Supplies, swapped};

/// The folder of object files on the node and in the container: an image brings its own kernel
/// programs, which these files replace.
const OBJECTS: &str = "/opt/kpx";

pub(super) enum Home {
    Node,
    Pod {
        set: Box<DaemonSet>,
        supplies: Supplies,
    },
}

pub(super) enum AnyAgent<'a> {
    Process(Agent<'a>),
    Container(Box<Running<'a>>),
}

impl Home {
    pub(super) fn new(place: Place, lab: &Lab, server: &ApiServer) -> Result<Self> {
        match place {
            Place::Node => Ok(Self::Node),
            Place::SwappedPod => Self::swapped(lab, server),
        }
    }

    /// kubeadm's DaemonSet for kube-proxy, with kpx's image.
    fn swapped(lab: &Lab, server: &ApiServer) -> Result<Self> {
        let (mut set, config) = swapped()?;
        let service_account = lab.dir().join("service-account");
        fs::create_dir(&service_account)?;
        server.service_account(&service_account)?;
        let mount = VolumeMount {
            name: "objects".to_owned(),
            mount_path: OBJECTS.to_owned(),
            ..VolumeMount::default()
        };
        container(&mut set)?
            .volume_mounts
            .get_or_insert_default()
            .push(mount);
        let host_path = HostPathVolumeSource {
            path: OBJECTS.to_owned(),
            type_: Some("DirectoryOrCreate".to_owned()),
        };
        let volume = Volume {
            name: "objects".to_owned(),
            host_path: Some(host_path),
            ..Volume::default()
        };
        pod(&mut set)?.volumes.get_or_insert_default().push(volume);
        let address = server.address().to_string();
        let files = config.data.unwrap_or_default().into_iter();
        let files: BTreeMap<_, _> = files
            .map(|(name, text)| (name, text.replace("API_SERVER", &address)))
            .collect();
        let config_maps = [(config.metadata.name.context("a ConfigMap's name")?, files)].into();
        let supplies = Supplies {
            config_maps,
            service_account,
            hosts: String::new(),
        };
        Ok(Self::Pod {
            set: Box::new(set),
            supplies,
        })
    }

    /// Makes a file visible to kpx, and returns its path there.
    pub(super) fn show(&self, lab: &Lab, file: &Path) -> Result<PathBuf> {
        if let Self::Node = self {
            return Ok(file.to_owned());
        }
        let name = file.file_name().context("a file's name")?;
        let folder = Running::on_node(lab, &lab.n1, Path::new(OBJECTS))?;
        fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
        fs::copy(file, folder.join(name)).with_context(|| format!("copy {}", file.display()))?;
        Ok(Path::new(OBJECTS).join(name))
    }
}

impl<'a> AnyAgent<'a> {
    /// Starts kpx on the lab's first node, and waits until it serves the node.
    pub(super) fn start(
        home: &Home,
        lab: &'a Lab,
        source: Source,
        args: &[String],
    ) -> Result<Self> {
        match home {
            Home::Node => Ok(Self::Process(Agent::start_with(
                lab, &lab.n1, source, args,
            )?)),
            Home::Pod { set, supplies } => {
                let mut set = set.clone();
                container(&mut set)?
                    .command
                    .get_or_insert_default()
                    .extend_from_slice(args);
                Ok(Self::Container(Box::new(Running::ready(
                    lab, &lab.n1, &set, supplies,
                )?)))
            }
        }
    }

    pub(super) fn pid(&self) -> Pid {
        match self {
            Self::Process(agent) => agent.pid(),
            Self::Container(running) => running.pid(),
        }
    }

    pub(super) fn status(&self) -> Result<Value> {
        match self {
            Self::Process(agent) => agent.status(),
            Self::Container(running) => running.status(),
        }
    }

    /// Stops it by SIGTERM.
    pub(super) fn stop(self) -> Result<()> {
        match self {
            Self::Process(agent) => agent.stop(),
            Self::Container(running) => running.stop(),
        }
    }
}

fn pod(set: &mut DaemonSet) -> Result<&mut PodSpec> {
    set.spec
        .as_mut()
        .and_then(|spec| spec.template.spec.as_mut())
        .context("a pod's spec")
}

fn container(set: &mut DaemonSet) -> Result<&mut Container> {
    pod(set)?.containers.first_mut().context("a container")
}
