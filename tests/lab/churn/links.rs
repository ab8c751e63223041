//! Detaches BPF links of another process, and attaches a program exclusively, like `bpftool`.

use std::fs;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use anyhow::{Context, Result, ensure};
use nix::errno::Errno;
use nix::libc;
use nix::unistd::Pid;

/// Values of `enum bpf_cmd` (linux/bpf.h).
const PROG_ATTACH: i32 = 8;
const PROG_DETACH: i32 = 9;
const LINK_GET_FD_BY_ID: i32 = 30;
const LINK_DETACH: i32 = 34;
/// `BPF_CGROUP_SOCK_OPS` of `enum bpf_attach_type`.
const SOCK_OPS: u32 = 3;

/// Detaches the TCX links that a process holds on a device, from hooks with this suffix.
pub(crate) fn detach_all(pid: Pid, ifindex: u32, hook: &str) -> Result<()> {
    let mut detached = 0;
    for file in fs::read_dir(format!("/proc/{pid}/fdinfo"))? {
        // The process may have closed the descriptor.
        let Ok(text) = fs::read_to_string(file?.path()) else {
            continue;
        };
        let field = |name: &str| {
            text.lines()
                .find_map(|line| line.strip_prefix(name))
                .map(str::trim)
        };
        let is_it = field("attach_type:")
            .is_some_and(|attach_type| attach_type.ends_with(&format!("{hook})")))
            && field("ifindex:") == Some(&ifindex.to_string());
        if let Some(id) = field("link_id:").filter(|_| is_it) {
            detach(id.parse()?)?;
            detached += 1;
        }
    }
    ensure!(
        detached > 0,
        "no link on device {ifindex} is of process {pid}"
    );
    Ok(())
}

fn detach(id: u32) -> Result<()> {
    let fd = match bpf(LINK_GET_FD_BY_ID, id) {
        // The owner has closed the link first, after it noticed the loss of another link.
        Err(Errno::ENOENT) => return Ok(()),
        fd => fd.with_context(|| format!("open link {id}"))?,
    };
    // SAFETY: the kernel has just given us this file descriptor.
    let link = unsafe { OwnedFd::from_raw_fd(fd) };
    bpf(LINK_DETACH, link.as_raw_fd().cast_unsigned())
        .with_context(|| format!("detach link {id}"))?;
    Ok(())
}

/// Attaches a sock_ops program to a cgroup so that no other program may be attached there, like
/// `bpftool cgroup attach` without `multi`.
pub(crate) fn attach_alone(cgroup: BorrowedFd<'_>, program: BorrowedFd<'_>) -> Result<()> {
    on_cgroup(PROG_ATTACH, cgroup, program).context("attach alone")
}

/// Detaches the program from [`attach_alone`].
pub(crate) fn detach_alone(cgroup: BorrowedFd<'_>, program: BorrowedFd<'_>) -> Result<()> {
    on_cgroup(PROG_DETACH, cgroup, program).context("detach")
}

fn on_cgroup(command: i32, cgroup: BorrowedFd<'_>, program: BorrowedFd<'_>) -> Result<(), Errno> {
    let fd = |fd: BorrowedFd| fd.as_raw_fd().cast_unsigned();
    call(command, [fd(cgroup), fd(program), SOCK_OPS, 0]).map(drop)
}

/// Both commands read one number at the start of `union bpf_attr`.
fn bpf(command: i32, number: u32) -> Result<i32, Errno> {
    call(command, [number, 0, 0, 0])
}

fn call(command: i32, attr: [u32; 4]) -> Result<i32, Errno> {
    // SAFETY: the kernel reads `attr`, which lives that long, and no further than its size.
    let result =
        unsafe { libc::syscall(libc::SYS_bpf, command, attr.as_ptr(), size_of_val(&attr)) };
    // The result is a file descriptor or 0.
    Errno::result(result).map(|fd| fd as i32)
}
