//! Serves the cluster's names to local processes by DNS, and configures systemd-resolved to use
//! this server.

use std::convert::Infallible;
use std::fs;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rtnetlink::Handle;
use tokio::process::Command;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

use crate::control::AgentHandle;
use proxy_datapath::is_first_namespace;
use proxy_dns::{Cluster, Known, Server, Wanted, Zone};
use proxy_net as net;
use proxy_view::status::NamesStatus;

/// The wait before another attempt to listen, and between checks of systemd-resolved's settings.
const RETRY: Duration = Duration::from_secs(10);
/// The time after which systemd-resolved is configured again without a visible need.
const AGAIN: Duration = Duration::from_secs(900);
/// The time after which systemd-resolved is configured again if its settings are not visible.
const AGAIN_UNSEEN: Duration = Duration::from_secs(60);
/// The directory in which systemd-resolved stores a device's settings for its own next start.
const KEPT: &str = "/run/systemd/resolve/netif";
const PATIENCE: Duration = Duration::from_secs(10);

/// The address and domain of the DNS server.
#[derive(Clone, Debug, PartialEq)]
pub struct NamesOptions {
    pub address: SocketAddr,
    pub zone: Zone,
}

/// The state of the DNS server for `kpx status`.
pub type NamesState = watch::Receiver<NamesStatus>;

/// Returns the DNS server, if enabled, and its state.
pub(crate) fn start(
    options: Option<NamesOptions>,
    agent: &AgentHandle,
    netlink: &Handle,
) -> (Option<Names>, Option<NamesState>) {
    options
        .map(|options| Names::new(options, agent.clone(), netlink.clone()))
        .unzip()
}

pub(crate) async fn serve(names: Option<Names>) -> Infallible {
    match names {
        Some(names) => names.run().await,
        None => std::future::pending().await,
    }
}

pub(crate) struct Names {
    options: NamesOptions,
    agent: AgentHandle,
    netlink: Handle,
    status: watch::Sender<NamesStatus>,
}

impl Names {
    fn new(options: NamesOptions, agent: AgentHandle, netlink: Handle) -> (Self, NamesState) {
        let domain = options.zone.to_string();
        let (status, receiver) = watch::channel(NamesStatus {
            domain,
            ..NamesStatus::default()
        });
        (
            Self {
                options,
                agent,
                netlink,
                status,
            },
            receiver,
        )
    }

    /// Serves for as long as kpx runs. A failure is only reported, because connections do not need
    /// names.
    async fn run(self) -> Infallible {
        let cluster = AgentsCluster(self.agent.clone());
        let mut reported = None;
        loop {
            let NamesOptions { address, zone } = self.options.clone();
            let failed = match Server::bind(address, zone).await {
                Ok(server) => {
                    info!(%address, domain = %self.options.zone, "names are served");
                    self.status.send_modify(|status| {
                        (status.address, status.why_not) = (Some(address), None)
                    });
                    tokio::select! {
                        ended = server.serve(cluster.clone()) => ended.err(),
                        never = self.report_resolved() => match never {},
                    }
                }
                Err(error) => Some(error),
            };
            let why = failed.map(|error| format!("{error:#}"));
            if reported != why {
                warn!(why, "names are not served");
                reported.clone_from(&why);
            }
            self.status.send_modify(|status| {
                (status.address, status.asked_by_resolved, status.why_not) = (None, false, why);
            });
            sleep(RETRY).await;
        }
    }

    /// Makes systemd-resolved query kpx for names of the domain, by settings of the anchor's peer
    /// device, which no route uses. The settings are removed with the device.
    async fn report_resolved(&self) -> Infallible {
        let mut reported = None;
        let mut last: Option<Setting> = None;
        loop {
            let Some(device) = net::anchor::far_end(&self.netlink)
                .await
                .unwrap_or_default()
            else {
                self.status
                    .send_modify(|status| status.asked_by_resolved = false);
                sleep(RETRY).await;
                continue;
            };
            // systemd-resolved may start later, and other programs may change its settings. A new
            // device is configured at once.
            if last
                .as_ref()
                .is_some_and(|last| last.holds(device, kept(device)))
            {
                sleep(RETRY).await;
                continue;
            }
            let why = self
                .wire(device)
                .await
                .err()
                .map(|error| format!("configure systemd-resolved: {error:#}"));
            if reported.as_ref() != Some(&why) {
                match &why {
                    None => info!("systemd-resolved uses kpx for names of the cluster"),
                    Some(why) => info!(
                        why,
                        "names resolve only for programs that use kpx's DNS server"
                    ),
                }
                reported = Some(why.clone());
            }
            let kept = if why.is_none() { kept(device) } else { None };
            last = Some(Setting {
                device,
                kept,
                at: Instant::now(),
            });
            self.status.send_modify(|status| {
                (status.asked_by_resolved, status.why_not) = (why.is_none(), why)
            });
        }
    }

    /// Sets the DNS server and the domain of a device (org.freedesktop.resolve1, by `resolvectl`).
    async fn wire(&self, device: u32) -> Result<()> {
        if !is_of_this_machine()? {
            bail!("this network namespace is not the machine's own");
        }
        // systemd-resolved ignores devices without an address (resolved-link.c).
        net::anchor::address_far_end(&self.netlink, device).await?;
        let NamesOptions { address, zone } = &self.options;
        // systemd-resolved would send every name to a device with a server and no domain, so the
        // domain comes first.
        let domain = format!("~{zone}");
        let address = address.to_string();
        let settings: [&[&str]; 6] = [
            &["domain", net::anchor::PEER, &domain],
            // The device must send no LLMNR or mDNS, and kpx supports neither DNSSEC nor TLS.
            &["llmnr", net::anchor::PEER, "no"],
            &["mdns", net::anchor::PEER, "no"],
            &["dnssec", net::anchor::PEER, "no"],
            &["dnsovertls", net::anchor::PEER, "no"],
            &["dns", net::anchor::PEER, &address],
        ];
        for setting in settings {
            if let Err(error) = resolvectl(setting).await {
                // Settings that were made before the failure must not stay alone.
                let _ = resolvectl(&["revert", net::anchor::PEER]).await;
                return Err(error);
            }
        }
        Ok(())
    }
}

/// The last settings of systemd-resolved, as far as visible.
struct Setting {
    device: u32,
    /// The stored settings; `None` if systemd-resolved refused or did not store them.
    kept: Option<Vec<u8>>,
    at: Instant,
}

impl Setting {
    /// Returns true if the settings still hold. The check runs every ten seconds, without a child
    /// process.
    fn holds(&self, device: u32, kept: Option<Vec<u8>>) -> bool {
        let again = if self.kept.is_some() {
            AGAIN
        } else {
            AGAIN_UNSEEN
        };
        self.device == device && self.kept == kept && self.at.elapsed() < again
    }
}

/// Returns systemd-resolved's stored settings of a device. Their format is private: the bytes only
/// show whether they are unchanged.
fn kept(device: u32) -> Option<Vec<u8>> {
    fs::read(format!("{KEPT}/{device}")).ok()
}

/// Returns true if systemd-resolved has the same devices as this process. In another network
/// namespace the index of a device means another device.
fn is_of_this_machine() -> Result<bool> {
    match fs::read_link("/proc/1/ns/net") {
        Ok(of_init) => Ok(of_init == net::namespace()?),
        // Without the right to read the link, only the kernel's first namespace is certain.
        Err(_) => is_first_namespace(),
    }
}

async fn resolvectl(args: &[&str]) -> Result<()> {
    let run = Command::new("resolvectl")
        .args(args)
        .kill_on_drop(true)
        .output();
    let output = timeout(PATIENCE, run)
        .await
        .context("resolvectl does not answer")?
        .context("run resolvectl")?;
    if !output.status.success() {
        bail!(
            "resolvectl {}: {}",
            args.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(())
}

#[derive(Clone)]
struct AgentsCluster(AgentHandle);

impl Cluster for AgentsCluster {
    async fn known(&self, wanted: Wanted) -> Option<Known> {
        self.0.known(wanted).await.ok().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn systemd_resolved_is_told_again_when_what_it_kept_has_changed() {
        let kept = |text: &str| Some(text.as_bytes().to_vec());
        let seen = Setting {
            device: 7,
            kept: kept("ours"),
            at: Instant::now(),
        };
        let unseen = Setting {
            device: 7,
            kept: None,
            at: Instant::now(),
        };
        let holds = |setting: &Setting| {
            let found = [
                (7, kept("ours")),
                (7, kept("another's")),
                (7, None),
                (8, kept("ours")),
            ];
            found.map(|(device, kept)| setting.holds(device, kept))
        };
        tokio::time::advance(Duration::from_secs(59)).await;
        assert_eq!(
            [holds(&seen), holds(&unseen)],
            [[true, false, false, false], [false, false, true, false]]
        );
        tokio::time::advance(Duration::from_secs(2)).await;
        assert_eq!([holds(&seen)[0], holds(&unseen)[2]], [true, false]);
        tokio::time::advance(AGAIN).await;
        assert!(
            !holds(&seen)[0],
            "a systemd-resolved that has ended leaves the file behind"
        );
    }
}
