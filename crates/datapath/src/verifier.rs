//! Loads programs through the verifier: several at the same time, and despite signals.

use std::collections::BTreeMap;
use std::num::NonZero;
use std::sync::{Mutex, PoisonError};
use std::{iter, thread};

use anyhow::{Context, Result};
use aya::programs::{Program, ProgramError};
use aya::{Ebpf, EbpfLoader, VerifierLogLevel};
use nix::libc::EAGAIN;

/// The maximum number of attempts, as in libbpf (`PROG_LOAD_ATTEMPTS`). In each, aya calls the
/// kernel twice.
const ATTEMPTS: usize = 5;

/// Returns a loader with a log level that suits programs of kpx's size.
#[must_use]
pub fn loader<'a>() -> EbpfLoader<'a> {
    let mut loader = EbpfLoader::new();
    // aya reloads a refused program with a log. A log of every step takes megabytes and several
    // times as long, even if only a signal stopped the load, and an operator needs only its last
    // line. STATS logs only that line. (`cargo xtask verify` shows all steps.)
    loader.verifier_log_level(VerifierLogLevel::STATS);
    loader
}

/// Calls a program's `load`, and retries if a signal interrupted it. The verifier stops with EAGAIN
/// while a signal is pending (`do_check` in kernel/bpf/verifier.c).
pub fn load(mut program: impl FnMut() -> Result<(), ProgramError>) -> Result<(), ProgramError> {
    let mut attempts = iter::repeat_with(&mut program).take(ATTEMPTS);
    let mut result = attempts.next().expect("there are several");
    while let Err(ProgramError::LoadError { io_error, .. }) = &result
        && io_error.raw_os_error() == Some(EAGAIN)
        && let Some(next) = attempts.next()
    {
        result = next;
    }
    result
}

/// The programs verified at the same time. The largest program takes half of the total time, so
/// more threads gain little, and each needs verifier memory, which counts towards the container's
/// limit.
const LOADERS: usize = 2;

/// Loads programs by name, several at the same time. Verification takes most of a start, and holds
/// no kernel lock for privileged users.
pub(crate) fn load_all(ebpf: &mut Ebpf, names: impl Iterator<Item = &'static str>) -> Result<()> {
    let mut programs: BTreeMap<&str, &mut Program> = ebpf.programs_mut().collect();
    let wanted = names.map(|name| {
        let program = programs
            .remove(name)
            .with_context(|| format!("no program {name} in the BPF object"))?;
        Ok((name, program))
    });
    let wanted = wanted.collect::<Result<Vec<_>>>()?;
    let count = wanted.len();
    let waiting = Mutex::new(wanted.into_iter());
    // Release the lock before the load.
    let next = || {
        waiting
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .next()
    };
    let work = || iter::from_fn(next).try_for_each(|(name, program)| load_named(name, program));
    let others = thread::available_parallelism()
        .map_or(1, NonZero::get)
        .min(count)
        .min(LOADERS)
        .saturating_sub(1);
    thread::scope(|scope| {
        // If no thread can be spawned, this thread loads all programs.
        let spawn = || thread::Builder::new().spawn_scoped(scope, work).ok();
        let others: Vec<_> = iter::repeat_with(spawn).take(others).flatten().collect();
        let here = work();
        let ended = others.into_iter().map(|other| {
            other
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        iter::once(here).chain(ended).collect()
    })
}

fn load_named(name: &str, program: &mut Program) -> Result<()> {
    load_any(program).with_context(|| format!("load program {name}"))
}

/// Loads a program of any type that the BPF object contains, as [`load`] does.
pub fn load_any(program: &mut Program) -> Result<(), ProgramError> {
    load(|| match program {
        Program::SchedClassifier(program) => program.load(),
        Program::CgroupSockAddr(program) => program.load(),
        Program::SockOps(program) => program.load(),
        _ => Err(ProgramError::UnexpectedProgramType),
    })
}

#[cfg(test)]
mod tests {
    use std::io;

    use aya_obj::VerifierLog;
    use nix::libc::EINVAL;

    use super::*;

    /// Runs [`load`] on a program that the kernel refuses with these error numbers in turn. Returns
    /// the last error number and the number of attempts.
    fn refused(errnos: &[i32]) -> (Option<i32>, usize) {
        let mut tried = 0;
        let result = load(|| {
            let errno = errnos.get(tried);
            tried += 1;
            let refusal = |&errno| ProgramError::LoadError {
                io_error: io::Error::from_raw_os_error(errno),
                verifier_log: VerifierLog::new(String::new()),
            };
            errno.map_or(Ok(()), |errno| Err(refusal(errno)))
        });
        let errno = result.err().map(|error| match error {
            ProgramError::LoadError { io_error, .. } => {
                io_error.raw_os_error().expect("it was made of one")
            }
            other => panic!("{other}"),
        });
        (errno, tried)
    }

    #[test]
    fn a_signal_does_not_refuse_a_program() {
        assert_eq!(refused(&[]), (None, 1));
        assert_eq!(refused(&[EAGAIN, EAGAIN]), (None, 3));
        assert_eq!(refused(&[EAGAIN, EINVAL]), (Some(EINVAL), 2));
        assert_eq!(refused(&[EINVAL]), (Some(EINVAL), 1));
        assert_eq!(refused(&[EAGAIN; 9]), (Some(EAGAIN), ATTEMPTS));
    }
}
