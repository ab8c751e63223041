//! Formats an event as a line for people.

use super::event::{DecisionEvent, Event};

/// Returns the time of day in UTC, the kind of event, the client, the dialled address, and the
/// decision.
pub(super) fn line(event: &Event) -> String {
    let time = event.time.strftime("%H:%M:%S%.3f");
    if event.lost > 0 {
        return format!(
            "{time} lost      {} packets that were too many to show",
            event.lost
        );
    }
    let mut words = vec![format!("{time} {:<8}", event.what)];
    words.extend(event.reason.clone());
    words.extend(event.protocol.clone());
    if let (Some(client), Some(dialled)) = (event.client, event.dialled) {
        words.push(format!("{client} > {dialled}"));
    }
    words.extend(event.decision.as_ref().map(decision));
    let device = event
        .device
        .clone()
        .unwrap_or_else(|| format!("device {}", event.ifindex));
    words.push(format!("({} of {device})", event.hook));
    words.join(" ")
}

fn decision(decision: &DecisionEvent) -> String {
    let DecisionEvent { kind, origin, .. } = decision;
    let mut text = match (&decision.namespace, &decision.name) {
        (Some(namespace), Some(name)) => format!("{kind} of {namespace}/{name}"),
        _ => format!("{kind} of {}", decision.service),
    };
    if let Some(port_name) = &decision.port_name {
        text = text + ":" + port_name;
    }
    text += &format!(" from {origin}");
    if let Some(backend) = decision.backend {
        text += &format!(" => {backend}");
    }
    if decision.affinity {
        text += " by affinity";
    }
    match decision.source {
        Some(source) if decision.masquerade => text += &format!(" masqueraded as {source}"),
        Some(source) => text += &format!(" as {source}"),
        None => {}
    }
    text
}

#[cfg(test)]
mod tests {
    use anyhow::Result;

    use super::*;

    fn event() -> Result<Event> {
        let decision = DecisionEvent {
            kind: "NodePort".to_owned(),
            service: "10.96.0.10:80".parse()?,
            namespace: Some("shop".to_owned()),
            name: Some("web".to_owned()),
            port_name: Some("http".to_owned()),
            origin: "outside".to_owned(),
            set: Some("cluster".to_owned()),
            backend: Some("10.244.2.11:8080".parse()?),
            affinity: false,
            source: Some("172.18.0.11:61500".parse()?),
            masquerade: true,
        };
        Ok(Event {
            time: "2026-01-02T03:04:05.678Z".parse()?,
            what: "decision".to_owned(),
            hook: "ingress".to_owned(),
            ifindex: 2,
            device: Some("eth0".to_owned()),
            protocol: Some("TCP".to_owned()),
            client: Some("192.0.2.1:1000".parse()?),
            dialled: Some("172.18.0.11:30080".parse()?),
            decision: Some(decision),
            ..Event::lost(0)
        })
    }

    #[test]
    fn line_has_client_target_and_decision() -> Result<()> {
        let mut event = event()?;
        assert_eq!(
            line(&event),
            "03:04:05.678 decision TCP 192.0.2.1:1000 > 172.18.0.11:30080 NodePort of shop/web:http from outside => \
             10.244.2.11:8080 masqueraded as 172.18.0.11:61500 (ingress of eth0)"
        );
        event.what = "drop".to_owned();
        event.reason = Some("not_unicast".to_owned());
        (
            event.protocol,
            event.client,
            event.dialled,
            event.decision,
            event.device,
        ) = (None, None, None, None, None);
        assert_eq!(
            line(&event),
            "03:04:05.678 drop     not_unicast (ingress of device 2)"
        );
        event.lost = 7;
        assert_eq!(
            line(&event),
            "03:04:05.678 lost      7 packets that were too many to show"
        );
        Ok(())
    }
}
