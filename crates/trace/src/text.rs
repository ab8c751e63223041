//! Formats a trace as text.

use std::fmt::{self, Display};

use crate::report::{Backend, FrontendKind, Origin, Outcome, Service, Tally, Trace, Verdict};

impl Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { packet, hook, .. } = self;
        write!(f, "{} > {}/{}", packet.from, packet.to, packet.protocol)?;
        writeln!(
            f,
            " on {}, met by {} at {}",
            self.node, hook.program, hook.device
        )?;
        write!(f, "{}", self.outcome)?;
        if packet.count > 1 {
            writeln!(f, "\nof {} packets from as many ports:", packet.count)?;
            self.tally
                .iter()
                .try_for_each(|tally| writeln!(f, "  {tally}"))?;
        }
        self.notes
            .iter()
            .try_for_each(|note| writeln!(f, "\nnote: {note}"))
    }
}

impl Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(frontend) = &self.frontend {
            line(
                f,
                "frontend",
                format_args!("{}, {}", frontend.at, frontend.kind),
            )?;
        }
        if let Some(service) = &self.service {
            line(f, "service", service)?;
        }
        if let Some(origin) = self.origin {
            line(f, "client", origin)?;
        }
        if let Some(set) = &self.set {
            line(
                f,
                "backends",
                format_args!("{} in the {} set", set.backends.len(), set.name),
            )?;
            set.backends
                .iter()
                .try_for_each(|backend| line(f, "", backend))?;
            if let Some(secs) = set.affinity_seconds {
                let known = if self.affinity_hit {
                    "this client is known"
                } else {
                    "this client is new"
                };
                line(
                    f,
                    "affinity",
                    format_args!("by client address for {secs} s; {known}"),
                )?;
            }
        }
        match (&self.backend, self.verdict, &self.reason) {
            (Some(backend), verdict, _) => {
                line(f, "verdict", format_args!("{verdict} to {backend}"))?
            }
            (None, verdict, Some(reason)) => {
                line(f, "verdict", format_args!("{verdict} ({reason})"))?
            }
            (None, verdict, None) => line(f, "verdict", verdict)?,
        }
        line(f, "", &self.explanation)?;
        let names = std::iter::once("to do").chain(std::iter::repeat(""));
        names
            .zip(&self.remedy)
            .try_for_each(|(name, step)| line(f, name, step))?;
        if let Some(source) = &self.source {
            let how = if source.masqueraded {
                "masqueraded as"
            } else {
                "seen as"
            };
            line(f, "source", format_args!("{how} {}", source.at))?;
            line(f, "", &source.explanation)?;
        }
        Ok(())
    }
}

/// Writes a name and a text; an empty name continues the line above.
fn line(f: &mut fmt::Formatter<'_>, name: &str, text: impl Display) -> fmt::Result {
    writeln!(f, "  {name:<10} {text}")
}

impl Display for FrontendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Address => "a ClusterIP without this port",
            Self::ClusterIp => "a ClusterIP",
            Self::NodePort => "a node port",
            Self::ExternalIp => "an external IP",
            Self::LoadBalancer => "a load balancer's address",
            Self::Redirected => "an address of a local redirect",
            Self::Unknown => "of a kind unknown to this kpx",
        })
    }
}

impl Display for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Some(namespace), Some(name)) = (&self.namespace, &self.name) else {
            return write!(f, "the one at {}", self.key);
        };
        write!(f, "{namespace}/{name}")?;
        match self.port_name.as_deref() {
            None => Ok(()),
            Some("") => write!(f, " at {}", self.key),
            Some(port) => write!(f, " port {port} at {}", self.key),
        }
    }
}

impl Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Node => "this node itself",
            Self::Pod => "a pod of this node",
            Self::Detected => "a local pod by --detect-local-mode",
            Self::Outside => "outside this node",
        })
    }
}

impl Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.at)?;
        if self.local {
            f.write_str(", on this node")?;
        }
        self.weight
            .map_or(Ok(()), |weight| write!(f, ", weight {weight}"))
    }
}

impl Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Forward => "forward",
            Self::Reject => "reject",
            Self::Drop => "drop",
            Self::Pass => "pass",
        })
    }
}

impl Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>5} {}", self.packets, self.verdict)?;
        self.backend
            .iter()
            .try_for_each(|backend| write!(f, " to {backend}"))?;
        self.reason
            .iter()
            .try_for_each(|reason| write!(f, " ({reason})"))
    }
}
