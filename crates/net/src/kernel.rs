//! The kernel's release, and whether tc programs can preempt each other.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result};
use flate2::read::GzDecoder;

/// Returns the major and minor number of a kernel release; `None` if the release does not start
/// with a number. A missing minor number is 0.
pub fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release
        .split(|c: char| !c.is_ascii_digit())
        .map(|number| number.parse().ok());
    Some((numbers.next()??, numbers.next().flatten().unwrap_or(0)))
}

/// The first kernel version that can be built without the softirq lock.
const LOCK_IS_OPTIONAL: (u32, u32) = (6, 18);

/// The advice for a kernel that does not pass [`Preemption::verdict`].
pub const MEND_PREEMPTION: &str =
    "boot a kernel with CONFIG_PREEMPT_RT_NEEDS_BH_LOCK=y, or one without PREEMPT_RT";

/// The properties of a kernel that decide whether a tc program can preempt another on its CPU.
///
/// The programs keep working data in per-CPU memory. Without PREEMPT_RT, softirq code runs to
/// completion before other softirq code starts on that CPU. With PREEMPT_RT a lock ensures this,
/// and kernels from Linux 6.18 on can be built without the lock.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Preemption {
    pub release: String,
    pub is_realtime: bool,
    /// The kernel's configuration, if readable. It is read only if the verdict depends on it.
    pub config: Option<String>,
}

impl Preemption {
    /// Reads the running kernel's properties. `root` is the directory with `proc`, `sys` and
    /// `boot`.
    pub fn read(root: &Path) -> Result<Self> {
        let text = |path: &str| fs::read_to_string(root.join(path));
        let release = text("proc/sys/kernel/osrelease")
            .context("read the kernel's release")?
            .trim()
            .to_owned();
        let version = text("proc/sys/kernel/version").context("read the kernel's version")?;
        let is_reported = text("sys/kernel/realtime").is_ok_and(|realtime| realtime.trim() == "1");
        let is_realtime = is_reported || version.contains("PREEMPT_RT");
        let config = if is_realtime {
            config(root, &release)
        } else {
            None
        };
        Ok(Self {
            release,
            is_realtime,
            config,
        })
    }

    /// Returns the reason why programs cannot preempt each other, or, as an error, the reason why
    /// they can.
    pub fn verdict(&self) -> Result<&'static str, String> {
        let has_line = |line: &str| {
            self.config
                .as_deref()
                .is_some_and(|config| config.lines().any(|one| one == line))
        };
        let is_older = version(&self.release).is_some_and(|version| version < LOCK_IS_OPTIONAL);
        if !self.is_realtime {
            return Ok("no PREEMPT_RT");
        }
        if has_line("CONFIG_PREEMPT_RT_NEEDS_BH_LOCK=y") {
            return Ok("PREEMPT_RT, built with PREEMPT_RT_NEEDS_BH_LOCK");
        }
        // A distribution may backport the option to an older kernel.
        if is_older && !has_line("# CONFIG_PREEMPT_RT_NEEDS_BH_LOCK is not set") {
            return Ok("PREEMPT_RT, with the lock that such kernels have before Linux 6.18");
        }
        Err(match &self.config {
            Some(_) => {
                "PREEMPT_RT without PREEMPT_RT_NEEDS_BH_LOCK: programs on a CPU preempt each other and corrupt packets"
                    .to_owned()
            }
            None => format!(
                "PREEMPT_RT, perhaps built without PREEMPT_RT_NEEDS_BH_LOCK: neither /proc/config.gz nor \
                 /boot/config-{} can be read",
                self.release
            ),
        })
    }
}

/// Returns the configuration of the kernel with this release. A container may have neither file.
fn config(root: &Path, release: &str) -> Option<String> {
    let mut text = String::new();
    let unpacked = File::open(root.join("proc/config.gz"))
        .and_then(|file| GzDecoder::new(file).read_to_string(&mut text));
    unpacked
        .map(|_| text)
        .or_else(|_| fs::read_to_string(root.join(format!("boot/config-{release}"))))
        .ok()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    #[test]
    fn releases_have_versions() {
        assert_eq!(version("5.10.0-46-cloud-amd64"), Some((5, 10)));
        assert_eq!(version("6.18.44+deb13"), Some((6, 18)));
        assert_eq!(version("7.0-rc1"), Some((7, 0)));
        assert_eq!(version("7"), Some((7, 0)));
        assert_eq!(version("mainline"), None);
    }

    const SET: &str = "CONFIG_PREEMPT_RT=y\nCONFIG_PREEMPT_RT_NEEDS_BH_LOCK=y\n";
    const UNSET: &str = "CONFIG_PREEMPT_RT=y\n# CONFIG_PREEMPT_RT_NEEDS_BH_LOCK is not set\n";

    #[test]
    fn a_realtime_kernel_must_have_the_lock() {
        for (release, is_realtime, config, fits) in [
            ("6.18.0", false, None, true),
            ("6.18.0", false, Some(UNSET), true),
            ("6.12.9-rt1", true, None, true),
            ("6.12.9-rt1", true, Some("CONFIG_PREEMPT_RT=y"), true),
            ("6.12.9-rt1", true, Some(UNSET), false),
            ("6.18.0", true, Some(SET), true),
            ("7.3.1", true, Some(UNSET), false),
            ("6.18.0", true, Some("CONFIG_PREEMPT_RT=y"), false),
            ("6.18.0", true, None, false),
            ("mainline", true, None, false),
        ] {
            let config = config.map(str::to_owned);
            let preemption = Preemption {
                release: release.to_owned(),
                is_realtime,
                config,
            };
            assert_eq!(preemption.verdict().is_ok(), fits, "{preemption:?}");
        }
    }

    #[test]
    fn a_realtime_kernel_is_recognised_and_its_configuration_found() {
        let root = tempfile::tempdir().unwrap();
        let put = |path: &str, bytes: &[u8]| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        };
        put("proc/sys/kernel/osrelease", b"6.18.1\n");
        put("proc/sys/kernel/version", b"#1 SMP PREEMPT_DYNAMIC\n");
        put("boot/config-6.18.1", SET.as_bytes());
        let read = || Preemption::read(root.path()).unwrap();
        assert_eq!(
            read(),
            Preemption {
                release: "6.18.1".to_owned(),
                is_realtime: false,
                config: None
            }
        );
        put("proc/sys/kernel/version", b"#1 SMP PREEMPT_RT Debian\n");
        assert_eq!(
            (read().is_realtime, read().config.as_deref()),
            (true, Some(SET))
        );
        put("proc/sys/kernel/version", b"#1 SMP\n");
        put("sys/kernel/realtime", b"1\n");
        let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
        gzip.write_all(UNSET.as_bytes()).unwrap();
        put("proc/config.gz", &gzip.finish().unwrap());
        assert_eq!(
            (read().is_realtime, read().config.as_deref()),
            (true, Some(UNSET))
        );
    }
}
