//! Settings, which the loader writes before it loads the programs. The verifier knows their values,
//! and leaves out of the programs what they rule out.

use proxy_common::flow::Timeouts;
use proxy_common::maps::FLOWS;

/// A value of the object's read-only data.
#[repr(transparent)]
pub struct Setting<T>(T);

impl<T: Copy> Setting<T> {
    /// The value that the loader has set. (By a plain read the compiler would take it for what it
    /// says here.)
    #[inline(always)]
    pub fn get(&self) -> T {
        // SAFETY: a reference to an initialised value, which the loader writes only before the
        // programs were loaded.
        unsafe { (&raw const self.0).read_volatile() }
    }
}

/// A zero that the compiler does not know, but the verifier does. Where the compiler knows that it
/// clears a structure, it calls a function that does so byte by byte.
pub static ZERO: Setting<u64> = Setting(0);

macro_rules! settings {
    ($($(#[$doc:meta])* $name:ident: $type:ty = $default:expr;)*) => {
        $(
            $(#[$doc])*
            // SAFETY: the loader finds a setting by its name, which no other symbol of the object
            // has.
            #[cfg_attr(target_arch = "bpf", unsafe(no_mangle))]
            pub static $name: Setting<$type> = Setting($default);
        )*
    };
}

settings! {
    /// Not 0: packet marks are kept in `mark` as well, and only `mark` says whether the host made
    /// the packet. This is for BPF_PROG_TEST_RUN, which takes and shows `mark`, but no `tc_index`,
    /// and before Linux 5.17 no `ingress_ifindex`.
    EXPOSES_PACKET_MARK: u32 = 0;

    /// 0: no packet skips the stack, and the programs have nothing for it. Else `Node::FAST_PATH`
    /// says whether any does.
    FAST_PATH: u32 = 0;

    /// Not 0: the hooks leave the slow path to the programs in `SLOW`. Else they have it themselves.
    SPLIT: u32 = 0;

    /// Answers of each CPU in one second. A flood in a victim's name must not become a flood of
    /// answers.
    ANSWERS_PER_SEC: u32 = 1_024;

    /// The rings of the half-open queue, a power of two, and the places of each: see
    /// [`proxy_common::half_open::Rings`].
    HALF_OPEN_RINGS: u32 = 1;
    HALF_OPEN_PLACES: u32 = FLOWS / 4;

    /// The entries that the table of flows has room for.
    FLOW_ROOM: u32 = FLOWS;

    /// The times of [`Timeouts`], in seconds.
    TCP_ESTABLISHED_SECS: u32 = Timeouts::DEFAULT.tcp_established;
    TCP_HALF_CLOSED_SECS: u32 = Timeouts::DEFAULT.tcp_half_closed;
    UDP_SECS: u32 = Timeouts::DEFAULT.udp;
    UDP_STREAM_SECS: u32 = Timeouts::DEFAULT.udp_stream;

    /// The cookie of the network namespace whose sockets are served.
    SOCKET_NETNS: u64 = 0;

    /// Bits of [`proxy_common::socket`].
    SOCKET_FLAGS: u32 = 0;
}

/// Returns the times for which flows may be silent.
#[inline(always)]
pub fn timeouts() -> Timeouts {
    Timeouts {
        tcp_established: TCP_ESTABLISHED_SECS.get(),
        tcp_half_closed: TCP_HALF_CLOSED_SECS.get(),
        udp: UDP_SECS.get(),
        udp_stream: UDP_STREAM_SECS.get(),
    }
}
