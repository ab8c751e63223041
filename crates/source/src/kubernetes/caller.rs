//! The user behind `sudo`, whose files kpx does not find by itself.

use std::env;
use std::fmt;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use kube::Config;
use nix::unistd::{User, geteuid};

/// Returns the advice to name the kubeconfig of the user who called `sudo`; empty without `sudo`.
pub(super) fn advice() -> String {
    let caller = env::var("SUDO_USER").ok().filter(|name| name != "root");
    caller
        .and_then(|name| User::from_name(&name).ok()?)
        .map(|user| {
            let path = user.dir.join(".kube/config");
            format!("; under sudo pass --kubeconfig {}", path.display())
        })
        .unwrap_or_default()
}

/// A credential plugin with a home directory of another user. kpx drops the capability that would
/// let the plugin write there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignHome {
    plugin: String,
    home: PathBuf,
}

impl ForeignHome {
    /// Returns the plugin of a configuration, if HOME belongs to another user than this process.
    pub(super) fn of(config: &Config) -> Option<Self> {
        let plugin = config.auth_info.exec.as_ref()?.command.clone()?;
        let home = PathBuf::from(env::var_os("HOME")?);
        is_foreign(&home).then_some(Self { plugin, home })
    }
}

fn is_foreign(home: &Path) -> bool {
    fs::metadata(home).is_ok_and(|metadata| metadata.uid() != geteuid().as_raw())
}

impl fmt::Display for ForeignHome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "credential plugin {} cannot write to HOME={}, which belongs to another user",
            self.plugin,
            self.home.display()
        )
    }
}
