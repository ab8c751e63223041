//! This CPU's memory, which a hook borrows while it runs: the stack is too small.

use core::marker::PhantomData;

use aya_ebpf::macros::map;
use aya_ebpf::maps::PerCpuArray;
use proxy_common::addr::{Addr, Addr4, Addr6};
use proxy_common::flow::{Flow, FlowKey};
use proxy_common::frontend::Service;
use proxy_common::half_open::Place;
use proxy_common::policy::Decision;

use super::{Find, Live, Maps};
use crate::opening::Opening;
use crate::packet::Packet;
use crate::{icmp, redirect};

/// The data of a hook about the current packet.
#[derive(Clone, Copy)]
pub struct Scratch<A: Addr> {
    pub packet: Packet<A>,
    pub flow: Flow<A>,
    /// The decision about the flow that the packet opens.
    pub opening: Opening<A>,
    /// Another flow in the packet's way, or the flow of a second look-up.
    pub other: Flow<A>,
    pub service: Service,
    pub error: icmp::Error<A>,
    pub route: redirect::FibResult,
    pub becomes: redirect::Becomes<A>,
    /// Another node has handed over the packet at an ingress hook.
    pub handed_over: bool,
}

/// This CPU's memory: one map for all parts of both families, because Linux allows a program 64
/// maps.
#[map]
static ROOM: PerCpuArray<Rooms> = PerCpuArray::with_max_entries(1, 0);

pub struct Rooms {
    pub v4: Room<Addr4>,
    pub v6: Room<Addr6>,
}

#[derive(Clone, Copy)]
pub struct Room<A: Addr> {
    scratch: Scratch<A>,
    /// Borrowed while the hook holds the scratch.
    eviction: Eviction<A>,
    /// Borrowed while the hook holds both.
    closing: Closing<A>,
}

/// The first flow of a half-open ring, during its eviction.
#[derive(Clone, Copy)]
pub struct Eviction<A: Addr> {
    pub place: Place<A>,
    pub flow: Flow<A>,
}

/// A flow during its removal. Its key is here as well, because the stack has no room for it there.
#[derive(Clone, Copy)]
pub struct Closing<A: Addr> {
    pub opener: FlowKey<A>,
    pub flow: Flow<A>,
}

/// The right to borrow this CPU's memory. Each run of a hook has one. It has no size, so that it
/// takes no register.
pub struct Memory<'run>(PhantomData<&'run mut ()>);

/// The part of that right that covers the [`Decision`].
pub struct DecisionMemory<'run>(PhantomData<&'run mut ()>);

impl<'run> Memory<'run> {
    /// Takes the right, at the entry of a hook.
    ///
    /// # Safety
    ///
    /// The caller is a tc program, and calls this once. The kernel disables softirqs on the CPU
    /// around each tc program. A program to which a packet is redirected runs after this program
    /// has returned. So no other holder of the right runs on this CPU.
    ///
    /// The exception is `BPF_PROG_TEST_RUN`, which may run a program while softirqs are enabled. A
    /// test run has its own maps, or shares those of the real hook only if root requests it.
    #[inline(always)]
    pub unsafe fn of_hook() -> Self {
        Self(PhantomData)
    }

    /// Lends the right to a function.
    #[inline(always)]
    pub fn lend(&mut self) -> Memory<'_> {
        Memory(PhantomData)
    }

    /// Borrows the scratch, and returns the right to the decision.
    #[inline(always)]
    pub fn scratch<A: Maps>(self) -> Option<(&'run mut Scratch<A>, DecisionMemory<'run>)> {
        let rooms = ROOM.find(&0)?;
        Some(self.scratch_in(rooms))
    }

    /// The same, looked up inline: see [`Find::find_here`].
    #[inline(always)]
    pub fn scratch_here<A: Maps>(self) -> Option<(&'run mut Scratch<A>, DecisionMemory<'run>)> {
        let rooms = ROOM.find_here(&0)?;
        Some(self.scratch_in(rooms))
    }

    #[inline(always)]
    fn scratch_in<A: Maps>(
        self,
        rooms: Live<Rooms>,
    ) -> (&'run mut Scratch<A>, DecisionMemory<'run>) {
        let room = A::room(rooms.0.as_ptr());
        // SAFETY: the slot is this CPU's own, and `self` is used up: no other code has the right to
        // borrow this part of it during `'run`.
        (unsafe { &mut (*room).scratch }, self.decision())
    }

    #[inline(always)]
    pub fn decision(self) -> DecisionMemory<'run> {
        DecisionMemory(PhantomData)
    }
}

impl DecisionMemory<'_> {
    #[inline(always)]
    pub fn lend(&mut self) -> DecisionMemory<'_> {
        DecisionMemory(PhantomData)
    }
}

impl<'run> DecisionMemory<'run> {
    /// Borrows the room for the decision about the current packet.
    #[inline(always)]
    pub fn get<A: Maps>(self) -> Option<&'run mut Decision<A>> {
        let Live(mut decision) = A::MAPS.decisions.find(&0)?;
        // SAFETY: the slot is this CPU's own, and `self` is used up, the one right to borrow it
        // during `'run`.
        Some(unsafe { decision.as_mut() })
    }
}

#[inline(always)]
fn room<A: Maps>() -> Option<*mut Room<A>> {
    Some(A::room(ROOM.find(&0)?.0.as_ptr()))
}

/// Reads a value of the hook from memory again, so that the verifier assumes an arbitrary value.
#[inline(always)]
pub fn again<T: Copy>(value: &T) -> T {
    // SAFETY: a reference may be read.
    unsafe { core::ptr::from_ref(value).read_volatile() }
}

/// Borrows the room for the flow that is evicted.
///
/// # Safety
///
/// The caller is the only function that shortens the half-open queue, and does not recurse. Only tc
/// programs call it, and the kernel runs one tc program at a time on a CPU.
#[inline(always)]
pub unsafe fn eviction<'run, A: Maps>() -> Option<&'run mut Eviction<A>> {
    let room = room::<A>()?;
    // SAFETY: the slot is this CPU's own, and its caller promises to be alone with this part of it.
    Some(unsafe { &mut (*room).eviction })
}

/// Borrows the room for the flow that is closed.
///
/// # Safety
///
/// The caller is the only function that closes flows, and does not recurse. Only tc programs call
/// it, and the kernel runs one tc program at a time on a CPU.
#[inline(always)]
pub unsafe fn closing<'run, A: Maps>() -> Option<&'run mut Closing<A>> {
    let room = room::<A>()?;
    // SAFETY: the slot is this CPU's own, and its caller promises to be alone with this part of it.
    Some(unsafe { &mut (*room).closing })
}
