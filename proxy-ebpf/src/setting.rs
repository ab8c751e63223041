//! Settings, which the loader writes before it loads the programs. To the verifier they are
//! constants, and it removes the code that they make unreachable.

use proxy_common::flow::Timeouts;
use proxy_common::maps::FLOWS;

/// A value of the object's read-only data.
#[repr(transparent)]
pub struct Setting<T>(T);

impl<T: Copy> Setting<T> {
    /// Returns the value that the loader has set. (For a plain read, the compiler would insert the
    /// default.)
    #[inline(always)]
    pub fn get(&self) -> T {
        // SAFETY: a reference to an initialised value, which the loader writes only before it loads
        // the programs.
        unsafe { (&raw const self.0).read_volatile() }
    }
}

/// A zero for the verifier, but an unknown value for the compiler, which clears a structure with a
/// constant zero by a function that does so byte by byte.
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
    /// Not 0: hooks store packet marks in `mark` as well, and only `mark` shows whether the host
    /// made the packet. For BPF_PROG_TEST_RUN, which accepts and returns `mark`, but not
    /// `tc_index`, and `ingress_ifindex` only since Linux 5.17.
    EXPOSES_PACKET_MARK: u32 = 0;

    /// 0: the programs contain no fast path. Otherwise the flags of `Node::OF_FAST_PATH` enable it.
    FAST_PATH: u32 = 0;

    /// Not 0: the programs hand over packets of external clients to the backend's node.
    HANDS_OVER: u32 = 0;

    /// The answers of each CPU in one second. A flood of spoofed packets must not become a flood of
    /// answers to its victim.
    ANSWERS_PER_SEC: u32 = 1_024;

    /// The rings of the half-open queue, a power of two, and the places of each: see
    /// [`proxy_common::half_open::Rings`].
    HALF_OPEN_RINGS: u32 = 1;
    HALF_OPEN_PLACES: u32 = FLOWS / 4;

    /// The capacity of `FLOWS` in entries.
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
