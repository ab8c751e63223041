//! The kernel programs and their maps. Modules in reading order.
#![deny(unsafe_code)]

// The BPF object, and how it is loaded into the kernel.
mod datapath;
mod loaded;
pub mod object;
mod shares;
mod sizes;
pub mod slow_path;
mod sys;
pub mod test_run;
pub mod verifier;

// The hooks to which the programs are attached.
mod adopt;
mod attach;
mod attached;
mod links;
mod sockets;
mod verify;

// The maps that outlive the process.
mod drain;
mod persistence;
mod pins;

// The maps, by their content.
mod bypass_flows;
mod clock;
mod connects;
mod counters;
mod counts;
mod datagrams;
mod ends;
mod fast_path_ways;
mod flow_reader;
mod flows;
mod foreign_nat;
mod host_flows;
mod liberal_flows;
mod lost_flows;
mod maps;
mod monitor_reader;
mod node_maps;
mod pressure;
mod tables;
mod vote_reader;

pub use attach::{Attachments, Mechanism};
pub use attached::Attached;
pub use bypass_flows::{BypassFlow, BypassFlows};
pub use clock::boot_secs;
pub use counters::Counters;
pub use counts::{Counts, FamilyCounts, FlowCount, Totals};
pub use datagrams::ByBackend;
pub use datapath::{Datapath, Options};
pub use drain::Drain;
pub use fast_path_ways::FastPathWays;
pub use flow_reader::{FlowReader, ListedFlow};
pub use flows::{FlowMaps, Remaining, Swept};
pub use foreign_nat::ForeignNatPorts;
pub use host_flows::{HostFlows, TranslatedFlow};
pub use liberal_flows::{LiberalFlows, OpenFlow};
pub use loaded::{Loaded, LoadedProgram, may_open_by_id, open, open_or_pinned};
pub use lost_flows::{EndedFlow, Found, LostFlows, abort_sockets};
pub use maps::FamilyNames;
pub use monitor_reader::{AnyRecord, Monitor};
pub use node_maps::NodeMaps;
pub use persistence::{Persistence, PersistenceKind};
pub use pins::orphans::{Orphan, ensure_no_hidden_links, find, is_attached, serves};
pub use pins::{BPF_DIR, BpfFs, Pins, check_netns, ensure_bpf_fs, lock_if_there, remove};
pub use pressure::Pressure;
pub use sizes::Sizes;
pub use sockets::{
    Cgroup, PodRow, PodRows, PodSockets, SocketOptions, SocketsStatus, StaleSockets,
};
pub use sys::netns_cookie::is_first_namespace;
pub use tables::{KernelTables, Maps};
pub use verify::MissingProgram;
pub use vote_reader::VoteReader;
