//! The user behind `sudo`, whose files kpx does not find by itself.

use std::env;
use std::fmt;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use kube::Config;
use nix::unistd::geteuid;

/// Returns the advice to name the kubeconfig of the user who called `sudo`; empty if nobody did. A
/// static binary finds users only in `/etc/passwd`.
pub(super) fn advice() -> String {
    let caller = env::var("SUDO_USER").ok().filter(|name| name != "root");
    let users = fs::read_to_string("/etc/passwd").unwrap_or_default();
    caller
        .and_then(|name| home_of(&users, &name).map(|home| Path::new(home).join(".kube/config")))
        .map(|path| format!("; under sudo pass --kubeconfig {}", path.display()))
        .unwrap_or_default()
}

/// Finds a user's home in the text of `/etc/passwd`: `name:password:uid:gid:comment:home:shell`.
fn home_of<'a>(users: &'a str, name: &str) -> Option<&'a str> {
    users.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next()? == name).then(|| fields.nth(4))?
    })
}

/// A credential plugin whose home directory belongs to another user. kpx drops the capability that
/// would let the plugin write there.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn home_is_read_from_the_users_own_line() {
        let users = "root:x:0:0:root:/root:/bin/sh\nalice2:x:1:1::/x:\nalice:x:1000:1000:A, B:/home/alice:/bin/sh\nbob:x:2\n";
        assert_eq!(home_of(users, "alice"), Some("/home/alice"));
        assert_eq!(home_of(users, "bob"), None, "a line that is cut");
        assert_eq!(home_of(users, "carol"), None);
    }
}
