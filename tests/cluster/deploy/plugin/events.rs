//! `kubectl kpx events`.

use testbed::lab::Dual;

use super::*;
use crate::deploy::cluster::PORT;

#[test]
fn events_of_all_nodes_are_one_list() -> Result<()> {
    let cluster = Cluster::start()?;
    let web = cluster.web()?;
    let nodes = Nodes::start(&cluster)?;
    cluster.serves("n1")?;
    cluster.serves("n2")?;
    // Both nodes report the second event in the same words.
    let shared = Dual {
        v4: "198.51.100.7".parse()?,
        v6: "2001:db8::7".parse()?,
    };
    cluster.put_service(&web.external_ips(shared))?;
    let thief = Service::new("thief", 11, &["p2a"], PORT).external_ips(shared);
    cluster.put_service(&thief)?;
    let reported = || -> Result<Vec<Vec<String>>> {
        let output = nodes.run("events default/thief --no-headers")?;
        ensure!(output.status.success(), "{output:?}\n{}", nodes.logs());
        let text = String::from_utf8(output.stdout)?;
        Ok(text
            .lines()
            .map(|line| line.split_whitespace().map(str::to_owned).collect())
            .collect())
    };
    let is_of_both = |row: &Vec<String>| {
        row.starts_with(&["all".to_owned(), "2".to_owned()])
            && [3, 4, 5].map(|at| row[at].as_str())
                == ["Warning", "FrontendConflict", "service/default/thief"]
    };
    wait_until(DEADLINE, "both nodes report the conflict", || {
        Ok(reported()?.iter().any(is_of_both))
    })
    .with_context(|| format!("{:?}", reported()))?;
    let json = nodes.json("events --service-namespace default")?;
    let first = &json["n1"]["answer"][0];
    ensure!(
        first["name"] == "thief" && first["services"] == json!(["default/thief"]),
        "{json:?}"
    );
    let of_node = nodes.run("events --node n2 -o json")?;
    ensure!(
        String::from_utf8_lossy(&of_node.stdout).contains("\"reason\": \"Starting\""),
        "{of_node:?}"
    );

    let mut watch = nodes.command("events default/thief --watch -o json");
    let mut watch = Watched(cluster.lab.fabric.ns.spawn(watch.stdout(Stdio::piped()))?);
    let mut lines = BufReader::new(watch.0.stdout.take().context("an output")?).lines();
    let mut next =
        || -> Result<Value> { Ok(serde_json::from_str(&lines.next().context("a line")??)?) };
    ensure!(
        next()?["reason"] == "FrontendConflict",
        "the list comes first"
    );
    cluster.put_service(&thief.annotation("kpx.dev/lb-algorithm", "fastest"))?;
    let is_news = |event: &Value| {
        event["note"]
            .as_str()
            .is_some_and(|note| note.contains("lb-algorithm"))
    };
    let mut event = next()?;
    while !is_news(&event) {
        ensure!(
            event["name"] == "thief" && event["node"].is_string(),
            "{event}"
        );
        event = next()?;
    }
    ensure!(
        event["reason"] == "InvalidField" && event["node"].is_string(),
        "{event}"
    );
    Ok(())
}
