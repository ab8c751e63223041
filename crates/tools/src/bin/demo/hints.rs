//! Commands to try after the demo.

use std::process::Command;

use anyhow::Result;
use testbed::agent::{Agent, Service, Source, binary};
use testbed::lab::{Family, Lab};

/// Prints commands to try in a lab that stays.
pub(crate) fn print(lab: &Lab, agents: &[Agent; 2], source: Source, web: &Service) -> Result<()> {
    let [pod, node, fabric] = ["p1a", "n1", "fabric"].map(|name| lab.host(name).ns.name());
    let [web4, web6] = Family::ALL.map(|family| web.cluster_ip().ip(family));
    let kpx = |command: &str, what: &str| -> Result<()> {
        let kpx = binary()?;
        let run_dir = agents[0].run_dir().display();
        println!(
            "  ip netns exec {node} {} {command} --run-dir {run_dir}   # {what}",
            kpx.display()
        );
        Ok(())
    };
    println!("\nTry, as root. See what kpx does on n1:\n");
    kpx(
        "status",
        "is this node well, and what is dropped or rejected?",
    )?;
    kpx("backends", "which pods take new connections")?;
    kpx(
        "monitor",
        "each packet that opens a connection or is refused, as it happens",
    )?;
    kpx("top", "the traffic of each Service, live")?;
    kpx(
        "trace --from pod/default/p1a --to svc/default/web:tcp",
        "what becomes of a pod's connection, and why",
    )?;
    kpx(
        "trace --from pod/default/p1a --to svc/default/empty:tcp",
        "the same, and what to do where it is refused",
    )?;
    println!(
        "  ip netns exec {node} curl -s http://127.0.0.1:10249/ui/   # the web page of --ui, for a browser on the node"
    );
    println!("\nDial, and change things:\n");
    println!("  ip netns exec {pod} curl http://{web4}/   # from a pod");
    println!("  ip netns exec {node} curl 'http://[{web6}]/'   # from a process of the node");
    println!("  ip netns exec {pod} tcpdump -ni eth0   # while you dial");
    match source {
        Source::Kubeconfig(file) => {
            let kubectl = format!(
                "ip netns exec {fabric} kubectl --kubeconfig {}",
                file.display()
            );
            println!("  {kubectl} get services,endpointslices");
            println!("  {kubectl} delete service web");
        }
        Source::Manifests(dir) => println!("  ls {}   # edit, and see", dir.display()),
    }
    if Command::new("kubectl")
        .arg("version")
        .arg("--client")
        .output()
        .is_err()
    {
        println!("  (there is no kubectl on this machine)");
    }
    println!("\nThe lab stays until Ctrl-C.");
    Ok(())
}

/// Prints the next steps after a demo that removed its lab.
pub(crate) fn print_next() {
    println!(
        "\nNext:
  cargo xtask demo --keep     # leave all this up, with commands to try in it: monitor, top, trace, the web page
  cargo xtask demo --pods ptp # the same with pods as kind has them; also bridge, vxlan
  cargo xtask run -- check    # is this machine fit to run kpx? Nothing is changed
  docs/install.md             # in your cluster"
    );
}
