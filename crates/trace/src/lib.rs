//! `kpx trace`: sends a packet through a copy of the kernel programs, and explains their decision.
//! `kpx explain`: the same texts for a reason, without a packet.
#![forbid(unsafe_code)]

use std::net::SocketAddr;
use std::path::PathBuf;
use std::thread;

use anyhow::{Context, Result, ensure};
use clap::Args;
use nix::unistd::Uid;
use proxy_common::addr::{Addr4, Addr6};
use proxy_common::counter::Reason;
use proxy_common::frontend::FrontendKey;
use serde::Deserialize;

use proxy_datapath::object;
use proxy_view::RUN_DIR;
use proxy_view::client::WAITS;
use proxy_view::object_name::canonical_node_name;
use proxy_view::output::{Data, json, print, yaml};

mod answered;
mod explain;
mod explain_command;
mod input;
mod live;
mod manifests;
mod name;
mod namespace;
mod node;
mod outside_reach;
mod packet;
mod passed;
mod programs;
mod redirected;
pub mod report;
mod resolve;
mod target;
mod text;

use input::{Family, TraceInput};
use live::{Live, PacketArgs};
use manifests::Folder;
use name::{From, To};
use programs::{Programs, sock_addr};
use report::{Hook, Packet, TablesOf, Trace};
use resolve::{Ends, Known, has_names};
use target::Target;

pub use explain::{explain as meaning, remedy};
pub use explain_command::{ExplainArgs, explain};
pub use node::{NodeFlags, NodeRules};
pub use outside_reach::steps_to_reach;

/// Show the path of a packet through kpx, and the reason for its verdict. Needs root.
///
/// The packet opens a flow: a TCP SYN, a UDP datagram or an SCTP INIT. It runs through a copy of
/// the kernel programs and of the tables; real traffic is unaffected, and no packet is sent.
#[derive(Args, Debug)]
pub struct TraceArgs<N: NodeFlags> {
    /// Client: IP[:PORT], pod/[NAMESPACE/]NAME, a workload as deploy/[NAMESPACE/]NAME, or node/NAME
    /// for a process of this node. Default port: 32768.
    #[arg(long, value_name = "CLIENT", required_unless_present = "host")]
    from: Option<From>,
    /// Destination: IP:PORT, a Service as [svc/][NAMESPACE/]NAME[:PORT] or DNS name, a pod as
    /// pod/[NAMESPACE/]NAME[:PORT], or node/NAME:PORT. PORT is a number or a name, optionally with
    /// /tcp, /udp or /sctp (default: tcp).
    #[arg(long, value_name = "DESTINATION")]
    to: To,
    /// Treat the client as a process of this node, even if --from is a foreign address.
    #[arg(long)]
    host: bool,
    /// Ingress device of the packet. Default: the device of the kernel's route to the client.
    #[arg(long, value_name = "DEVICE", conflicts_with_all = ["host", "manifests"])]
    in_device: Option<String>,
    /// Treat the packet as handed over by another node (--external-forwarding dsr), as if its
    /// tunnel header were in order.
    #[arg(long, conflicts_with_all = ["host", "manifests"])]
    handed_over: bool,
    /// Run directory of the agent whose tables are used.
    #[arg(long, value_name = "DIR", default_value = RUN_DIR)]
    run_dir: PathBuf,
    /// Use the objects of this folder instead of an agent's tables; the node need not exist.
    #[arg(
        long,
        value_name = "DIR",
        requires = "node",
        conflicts_with = "run_dir"
    )]
    manifests: Option<PathBuf>,
    /// Name of the node, with --manifests.
    #[arg(long, value_name = "NAME", requires = "manifests")]
    node: Option<String>,
    /// Trace N packets, each from the next source port, and count the results.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    count: u32,
    /// Output format.
    #[arg(long, short, value_enum, default_value_t, value_name = "FORM")]
    output: Data,
    #[command(flatten)]
    services: N,
}

pub async fn trace<N: NodeFlags + Send + 'static>(args: TraceArgs<N>) -> Result<()> {
    let output = args.output;
    let trace = run(args)?;
    let text = match output {
        Data::Text => trace.to_string(),
        Data::Json => json(&trace)?,
        Data::Yaml => yaml(&trace)?,
    };
    print(&text)
}

/// Returns the text of a trace in the form of `--output json`.
pub fn text_of(trace: &serde_json::Value) -> Result<String> {
    Ok(Trace::deserialize(trace)
        .context("the trace of another version of kpx")?
        .to_string())
}

/// Runs the trace. Blocks while the kernel verifies the copy of the programs.
pub fn run<N: NodeFlags + Send + 'static>(args: TraceArgs<N>) -> Result<Trace> {
    ensure!(
        Uid::effective().is_root(),
        "kpx trace loads a copy of the kernel programs, which takes root"
    );
    // The trace may switch the network namespace of its thread, so it gets its own thread, which
    // ends afterwards.
    thread::spawn(move || on_own_thread(&args))
        .join()
        .map_err(|_| anyhow::anyhow!("the trace panicked"))?
}

fn on_own_thread<N: NodeFlags>(args: &TraceArgs<N>) -> Result<Trace> {
    if args.manifests.is_some() {
        namespace::leave()?;
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start a runtime")?;
    runtime.block_on(async {
        let tables = Tables::open(args).await?;
        let known = if has_names(args.from.as_ref(), &args.to) {
            tables.known().await?
        } else {
            Known::default()
        };
        let ends = known.resolve(args.from.as_ref(), &args.to);
        let ends = if tables.waits() {
            ends.context(WAITS)?
        } else {
            ends?
        };
        match ends.to.addr {
            SocketAddr::V4(_) => of_family::<Addr4, N>(tables, ends, args).await,
            SocketAddr::V6(_) => of_family::<Addr6, N>(tables, ends, args).await,
        }
    })
}

/// The source of the tables.
enum Tables<R> {
    Folder(Box<Folder<R>>),
    Live(Box<Live>),
}

impl<R: NodeRules> Tables<R> {
    async fn open<N: NodeFlags<Rules = R>>(args: &TraceArgs<N>) -> Result<Self> {
        if let (Some(dir), Some(node)) = (&args.manifests, &args.node) {
            return Ok(Self::Folder(Box::new(
                Folder::read(dir, &canonical_node_name(node), &args.services).await?,
            )));
        }
        let none_given = args.services.is_empty();
        ensure!(
            none_given,
            "the running agent has its own options: those of a node go with --manifests"
        );
        Ok(Self::Live(Box::new(Live::query(&args.run_dir).await?)))
    }

    /// Returns true while the agent waits for its first lists, and no Service has a name yet.
    fn waits(&self) -> bool {
        matches!(self, Self::Live(live) if live.waits())
    }

    /// Returns the objects that an argument may name.
    async fn known(&self) -> Result<Known> {
        match self {
            Self::Folder(folder) => Ok(folder.known()),
            Self::Live(live) => live.known().await,
        }
    }
}

async fn of_family<A: Family, N: NodeFlags>(
    tables: Tables<N::Rules>,
    Ends { from, to }: Ends,
    args: &TraceArgs<N>,
) -> Result<Trace> {
    let object = object::embedded()?;
    match tables {
        Tables::Folder(folder) => {
            let (input, from) = folder.input::<A>(from, args.host, &to).await?;
            let programs = Programs::load(object, &input, args.count, false)?;
            send(programs, input, from, to, args)
        }
        Tables::Live(live) => {
            let packet_args = PacketArgs {
                from,
                host: args.host,
                is_handed_over: args.handed_over,
                in_device: args.in_device.as_deref(),
            };
            let (input, from) = live.input::<A>(&packet_args, &to).await?;
            let calls_slow_path = live.calls_slow_path();
            let programs = Programs::load(object, &input, args.count, calls_slow_path)?;
            for (name, tag) in programs.tags()? {
                live.check_tag(name, &tag)?;
            }
            let mut trace = send(programs, input, from, to, args)?;
            let of_backends = answered::notes::<A>(&live, &trace).await;
            let of_way = passed::notes(&trace).await;
            for of in [of_backends, of_way] {
                trace.notes.extend(of.all);
                trace.warnings.extend(of.warnings);
            }
            Ok(trace)
        }
    }
}

/// Runs packets through the programs, and explains the first packet.
fn send<A: Family, N: NodeFlags>(
    mut programs: Programs<A>,
    input: TraceInput<A>,
    from: SocketAddr,
    to: Target,
    args: &TraceArgs<N>,
) -> Result<Trace> {
    let count = args.count;
    let mut clients = clients(from).take(count as usize);
    let runs = clients.try_fold(Vec::new(), |mut runs, client| {
        runs.push(programs.run(client, to.addr, to.proto)?);
        anyhow::Ok(runs)
    })?;
    let first = runs.first().context("at least one packet was sent")?;
    let dialled = sock_addr(to.addr)?;
    let outcome = explain::outcome(
        &input,
        from,
        &FrontendKey::new(dialled.addr, dialled.port, to.proto),
        first,
    );
    let is_refused = outcome.reason.as_deref() == Some(Reason::ClientShare.name());
    let share = input.shares.filter(|_| is_refused);
    let share = share.and_then(|share| Some(share.note(sock_addr(from).ok()?.addr)));
    let external_client = input
        .external_client_note
        .filter(|_| outcome.origin == Some(report::Origin::Outside));
    Ok(Trace {
        node: input.node_name.clone(),
        tables: if args.manifests.is_some() {
            TablesOf::Manifests
        } else {
            TablesOf::Agent
        },
        packet: Packet {
            from: from.to_string(),
            to: to.addr.to_string(),
            protocol: to.proto.to_string(),
            count,
        },
        hook: Hook {
            program: input.entry.program.to_owned(),
            device: input.entry.device.clone(),
        },
        outcome,
        tally: explain::tally(&runs),
        notes: input
            .notes
            .all
            .into_iter()
            .chain(share)
            .chain(external_client)
            .collect(),
        warnings: input.notes.warnings,
    })
}

/// Yields a client's address with each port, beginning with `first`.
fn clients(first: SocketAddr) -> impl Iterator<Item = SocketAddr> {
    let ports = (first.port()..=u16::MAX).chain(1..first.port());
    ports.map(move |port| SocketAddr::new(first.ip(), port))
}
