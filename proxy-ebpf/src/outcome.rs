//! The result of a packet's path through a program, in one register.

use aya_ebpf::bindings::{TC_ACT_SHOT, TC_ACT_UNSPEC};
use proxy_common::counter::{Reason, Verdict};

/// A tc action.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct Action(pub i32);

impl Action {
    /// Leave the packet to the next program; equals `TCX_NEXT`. (`TC_ACT_OK` would end the chain.)
    pub const PASS: Self = Self(TC_ACT_UNSPEC);
    pub const DROP: Self = Self(TC_ACT_SHOT);
}

/// The reasons by number, padded to a power of two.
static REASON_AT: [Option<Reason>; 64] = {
    let mut reasons = [None; 64];
    let mut index = 0;
    while index < Reason::ALL.len() {
        reasons[index] = Some(Reason::ALL[index]);
        index += 1;
    }
    reasons
};

/// A tc action or a [`Reason`], in one register.
#[repr(transparent)]
pub struct Outcome(pub i32);

impl Outcome {
    /// Reasons count up from here; actions are small numbers.
    const REASONS: i32 = 1_024;
    /// No result yet: the packet has to take the slow path.
    pub const NOT_ESTABLISHED: Self = Self(i32::MIN);

    #[inline(always)]
    pub fn new(result: Result<Action, Reason>) -> Self {
        Self::of_number(result.map(|Action(action)| action))
    }

    /// Encodes a small number, or a reason.
    #[inline(always)]
    pub fn of_number(result: Result<i32, Reason>) -> Self {
        match result {
            Ok(number) => Self(number),
            Err(reason) => Self(Self::REASONS + reason as i32),
        }
    }

    /// Returns `NotOurs` or `NoFlow`, the reasons of packets without a flow, which pass at every
    /// hook but the anchor. `None` for any other outcome.
    #[inline(always)]
    pub fn is_of_others(&self) -> Option<Reason> {
        const {
            assert!(
                matches!(Reason::NotOurs.verdict(), Verdict::Pass)
                    && matches!(Reason::NoFlow.verdict(), Verdict::Pass)
            )
        };
        [Reason::NotOurs, Reason::NoFlow]
            .into_iter()
            .find(|reason| self.0 == Self::REASONS + *reason as i32)
    }

    /// Returns the action, if there is one.
    #[inline(always)]
    pub fn action(&self) -> Option<Action> {
        (self.0 < Self::REASONS && !self.is_for_slow_path()).then_some(Action(self.0))
    }

    /// Returns true for a packet that continues unchanged, to the next program or to the stack.
    #[inline(always)]
    pub fn passes(&self) -> bool {
        self.0 >= Self::REASONS
            && self
                .number()
                .is_err_and(|reason| reason.verdict() == Verdict::Pass)
    }

    /// Returns true if the slow path has to take the packet.
    #[inline(always)]
    pub fn is_for_slow_path(&self) -> bool {
        self.0 == Self::NOT_ESTABLISHED.0
    }

    /// Returns true for a packet of another protocol, which may be an ICMP error about a packet of
    /// a flow.
    #[inline(always)]
    pub fn is_other_protocol(&self) -> bool {
        self.0 == Self::REASONS + Reason::Protocol as i32
    }

    #[inline(always)]
    pub fn result(self) -> Result<Action, Reason> {
        self.number().map(Action)
    }

    #[inline(always)]
    pub fn number(&self) -> Result<i32, Reason> {
        if self.0 < Self::REASONS {
            return Ok(self.0);
        }
        // A mask bounds the index for the verifier, however the compiler arranges the comparison
        // above.
        const MASK: i32 = REASON_AT.len() as i32 - 1;
        const { assert!(Self::REASONS & MASK == 0 && REASON_AT.len().is_power_of_two()) };
        REASON_AT[(self.0 & MASK) as usize].map_or(Ok(self.0), Err)
    }
}
