//! The kernel's warnings during a run.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;

use anyhow::{Context, Result, ensure};
use nix::fcntl::OFlag;

/// The beginnings of warnings, oopses and sanitizer reports.
const COMPLAINTS: [&str; 9] = [
    "WARNING:",
    "BUG:",
    "cut here",
    "Oops",
    "general protection",
    "KASAN",
    "UBSAN",
    "Call Trace",
    "refcount_t",
];

/// The kernel's log, read from the creation of this value on.
pub(crate) struct KernelLog(Option<File>);

impl KernelLog {
    pub(crate) fn open() -> Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(OFlag::O_NONBLOCK.bits())
            .open("/dev/kmsg");
        let mut file = match file {
            Ok(file) => file,
            Err(error) => {
                println!("the kernel's log cannot be read ({error}): complaints in it go unseen");
                return Ok(Self(None));
            }
        };
        file.seek(SeekFrom::End(0))
            .context("seek to the end of the kernel's log")?;
        Ok(Self(Some(file)))
    }

    /// Fails with the kernel's new warnings.
    pub(crate) fn check(&mut self) -> Result<()> {
        let Some(file) = &mut self.0 else {
            return Ok(());
        };
        let mut record = [0; 8_192];
        let mut complaints = Vec::new();
        loop {
            match file.read(&mut record) {
                Ok(len) => {
                    let text = String::from_utf8_lossy(&record[..len]);
                    complaints.extend(
                        COMPLAINTS
                            .iter()
                            .any(|word| text.contains(word))
                            .then(|| text.into_owned()),
                    );
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // Unread records were overwritten; the next read continues after them.
                Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
                Err(error) => return Err(error).context("read the kernel's log"),
            }
        }
        ensure!(
            complaints.is_empty(),
            "the kernel complains:\n{}",
            complaints.concat()
        );
        println!("the kernel has not complained");
        Ok(())
    }
}
