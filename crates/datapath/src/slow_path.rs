//! The programs of the slow path, and the array through which the hooks' programs call them.
//!
//! The kernel empties the array when its last descriptor or pin is gone, and then the hooks'
//! programs have no slow path. So each load has its own array, and pins it before its programs
//! replace a predecessor's. TCX links need pins in any case. clsact filters outlive the agent
//! without pins, and a container's pins do not outlive the container: in both cases each hook's
//! program contains the slow path ([`Options::whole`](crate::Options::whole)).

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use aya::Ebpf;
use aya::maps::{Map, MapData, ProgramArray};
use aya::util::KernelVersion;
use proxy_common::hook::{PacketHook, SlowProgram};
use proxy_common::names;
use tracing::debug;

use crate::attach::{loaded_as, program};
use crate::pins::{self, Pins, remove_pin};

/// Returns true if the kernel has TCX links.
pub(crate) fn may_be_separate() -> bool {
    const FIRST_WITH_TCX: KernelVersion = KernelVersion::new(6, 6, 0);
    KernelVersion::current().is_ok_and(|version| version >= FIRST_WITH_TCX)
}

/// The programs that every node loads at the start.
pub(crate) const COMMON: [SlowProgram; 2] = PacketHook::Ingress.slow();

/// Loads those programs of the slow path that are not loaded, and makes all of them callable.
pub fn load(ebpf: &mut Ebpf, programs: impl IntoIterator<Item = SlowProgram>) -> Result<()> {
    for slow in programs {
        let name = slow.program();
        let fd = loaded_as(ebpf, name)?.fd()?.try_clone()?;
        let map = ebpf.map_mut(names::SLOW).context("no map SLOW")?;
        let mut array: ProgramArray<&mut MapData> = map.try_into().context("map SLOW")?;
        array
            .set(slow.index(), &fd, 0)
            .with_context(|| format!("write {name} to SLOW"))?;
    }
    Ok(())
}

/// Returns true if the hooks' programs call the slow path, and so do not contain it.
pub(crate) fn is_separate(ebpf: &mut Ebpf) -> Result<bool> {
    let [slow, _] = COMMON;
    Ok(program(ebpf, slow.program())?.fd().is_ok())
}

/// Restores loaded programs in the array after another program has removed them. Packets in between
/// count as `Reason::SlowPathMissing`.
pub(crate) fn restore(ebpf: &mut Ebpf) -> Result<()> {
    for slow in SlowProgram::ALL {
        if program(ebpf, slow.program())?.fd().is_ok() {
            load(ebpf, [slow])?;
        }
    }
    Ok(())
}

/// The pin of a load's array. A drop removes it, unless programs of the load may be attached.
pub(crate) struct SlowPin {
    path: PathBuf,
    is_kept: bool,
}

impl SlowPin {
    pub(crate) fn new(pins: &Pins, ebpf: &Ebpf) -> Result<Self> {
        let Some(Map::ProgramArray(array)) = ebpf.map(names::SLOW) else {
            bail!("no map SLOW in the BPF object");
        };
        let id = array.info().context("read information about SLOW")?.id();
        let path = pins.slow().join(id.to_string());
        array
            .pin(&path)
            .with_context(|| format!("pin {}", path.display()))?;
        Ok(Self {
            path,
            is_kept: false,
        })
    }

    /// Call this before the first program of the load is attached.
    pub(crate) fn keep(&mut self) {
        self.is_kept = true;
    }
}

impl Drop for SlowPin {
    fn drop(&mut self) {
        if !self.is_kept
            && let Err(error) = remove_pin(&self.path)
        {
            debug!(error = format!("{error:#}"), "an unused array stays pinned");
        }
    }
}

/// Removes the pins of all loads but `own`, because their programs are no longer attached.
pub(crate) fn remove_pins(dir: &Path, own: Option<&SlowPin>) -> Result<()> {
    pins::names(dir)?
        .into_iter()
        .map(|name| dir.join(name))
        .filter(|path| own.is_none_or(|own| own.path != *path))
        .try_for_each(|path| remove_pin(&path))
}
