//! The model of an endpoint that may still be starting: asked for until there is one, for a bounded time.

use std::io::ErrorKind;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use http_body_util::BodyExt as _;
use http_body_util::Full;
use hyper::StatusCode;
use serde_json::Value;

use super::{Client, ClientArgs};

/// Between two looks at an endpoint that is not there yet.
const LOOK: Duration = Duration::from_millis(100);

/// What `/v1/models` told.
enum Told {
    /// This model is to be asked for.
    Model(String),
    /// Not yet, and why.
    NotYet(String),
}

impl Client {
    /// The model to ask for, where a person waits for the command `bench COMMAND`.
    ///
    /// # Errors
    /// As [`Self::model`].
    #[expect(clippy::print_stderr, reason = "a person sees why nothing happens yet")]
    pub(crate) async fn model_for(
        &self,
        command: &str,
        args: &ClientArgs,
    ) -> anyhow::Result<String> {
        let wait = Duration::from_secs(args.start_timeout_s);
        let say = |line: &str| eprintln!("headrace bench {command}: {line}");
        self.model(args.model.as_deref(), wait, say).await
    }

    /// The model to ask for: `named`, or the endpoint's first one. An endpoint that nobody listens at, or that has no
    /// worker yet, gets `wait` to start; `say` hears of it once.
    ///
    /// # Errors
    /// The endpoint did not start in time, or answers something that no waiting helps.
    async fn model(
        &self,
        named: Option<&str>,
        wait: Duration,
        say: impl Fn(&str),
    ) -> anyhow::Result<String> {
        let give_up = Instant::now() + wait;
        let mut said = false;
        loop {
            let asked = tokio::time::timeout(self.timeout, self.ask(named)).await;
            let told = asked.with_context(|| format!("{} does not answer", self.authority))??;
            let why = match told {
                Told::Model(model) => return Ok(model),
                Told::NotYet(why) => why,
            };
            if Instant::now() + LOOK > give_up {
                let waited =
                    if wait.is_zero() { String::new() } else { format!(" after {wait:?}") };
                anyhow::bail!("{} is not ready{waited}: {why}", self.authority);
            }
            if !std::mem::replace(&mut said, true) {
                say(&format!("waiting up to {wait:?} for {}: {why}", self.authority));
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    async fn ask(&self, named: Option<&str>) -> anyhow::Result<Told> {
        let mut connection = match self.dial().await {
            Ok(connection) => connection,
            Err(error) if nobody_listens(&error) => {
                return Ok(Told::NotYet("nobody listens there".to_owned()));
            }
            Err(error) => return Err(error.context(format!("dialling {}", self.authority))),
        };
        let mut request = hyper::Request::get("/v1/models").header("host", &self.authority);
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        let response = connection.send_request(request.body(Full::default())?).await?;
        let status = response.status();
        let body = response.into_body().collect().await?.to_bytes();
        match status {
            StatusCode::OK => told(named, &body).with_context(|| self.authority.clone()),
            StatusCode::SERVICE_UNAVAILABLE => Ok(Told::NotYet(format!("it answers {status}"))),
            // who names a model may know an endpoint that does not list any
            StatusCode::NOT_FOUND if named.is_some() => {
                Ok(Told::Model(named.unwrap_or_default().to_owned()))
            }
            _ => {
                let text = String::from_utf8_lossy(&body);
                let text: String = text.chars().take(super::MAX_ERROR_TEXT).collect();
                anyhow::bail!("{} answers {status} to GET /v1/models: {text}", self.authority)
            }
        }
    }
}

fn told(named: Option<&str>, body: &[u8]) -> anyhow::Result<Told> {
    let list: Value = serde_json::from_slice(body).context("/v1/models is not JSON")?;
    let models = list["data"].as_array().context("/v1/models has no list `data`")?;
    let ids: Vec<&str> = models.iter().filter_map(|model| model["id"].as_str()).collect();
    Ok(match (named, ids.first()) {
        (_, None) => Told::NotYet("it serves no model yet".into()),
        (None, Some(first)) => Told::Model((*first).to_owned()),
        (Some(named), Some(_)) if ids.contains(&named) => Told::Model(named.to_owned()),
        (Some(named), Some(_)) => {
            anyhow::bail!("it does not serve `{named}`, but {}", ids.join(", "))
        }
    })
}

fn nobody_listens(error: &anyhow::Error) -> bool {
    error.downcast_ref::<std::io::Error>().is_some_and(|error| {
        matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset)
    })
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::super::tests::client;
    use super::*;

    const NONE: &str = r#"200 OK|{"data": []}"#;
    const ONE: &str = r#"200 OK|{"data": [{"id": "m"}, {"id": "other"}]}"#;

    /// Answers each connection with the next of `answers`, `STATUS|BODY`.
    async fn serve(listener: TcpListener, answers: Vec<&'static str>) {
        for answer in answers {
            let (mut socket, _) = listener.accept().await.unwrap();
            let mut request = [0; 4096];
            assert!(socket.read(&mut request).await.unwrap() > 0);
            let (status, body) = answer.split_once('|').unwrap();
            let length = body.len();
            let head = format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\n\r\n");
            socket.write_all((head + body).as_bytes()).await.unwrap();
        }
    }

    /// What is found, and what was said meanwhile.
    async fn found(
        named: Option<&str>,
        answers: Vec<&'static str>,
        wait: Duration,
    ) -> (anyhow::Result<String>, Vec<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = client(&listener.local_addr().unwrap().to_string(), "A: b").unwrap();
        let said = RefCell::new(Vec::new());
        let served = tokio::spawn(serve(listener, answers));
        let model = client.model(named, wait, |line| said.borrow_mut().push(line.to_owned())).await;
        served.abort();
        (model, said.into_inner())
    }

    const LONG: Duration = Duration::from_secs(20);

    #[tokio::test]
    async fn an_endpoint_without_a_worker_is_waited_for_and_that_is_said_once() {
        let late = vec![NONE, "503 Service Unavailable|{}", NONE, ONE];
        let (model, said) = found(None, late, LONG).await;
        assert_eq!(model.unwrap(), "m");
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(said[0].contains("20s") && said[0].contains("no model yet"), "{said:?}");
        let (model, said) = found(Some("other"), vec![ONE], LONG).await;
        assert_eq!((model.unwrap().as_str(), said.len()), ("other", 0));
    }

    #[tokio::test]
    async fn one_that_nobody_listens_at_is_given_up_after_the_time_that_it_has() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = client(&listener.local_addr().unwrap().to_string(), "A: b").unwrap();
        drop(listener);
        let error = client.model(None, Duration::from_millis(150), |_| ()).await.unwrap_err();
        let text = format!("{error:#}");
        assert!(text.contains("not ready after 150ms: nobody listens there"), "{text}");
    }

    #[tokio::test]
    async fn what_no_waiting_helps_is_told_at_once() {
        for (answer, named, says) in [
            ("401 Unauthorized|a key is asked for", None, "a key is asked for"),
            ("500 Internal Server Error|", None, "500"),
            ("200 OK|<html>", None, "not JSON"),
            ("200 OK|{}", None, "no list"),
            (ONE, Some("third"), "does not serve `third`, but m, other"),
            ("404 Not Found|", None, "404"),
        ] {
            let (model, said) = found(named, vec![answer], LONG).await;
            let text = format!("{:#}", model.unwrap_err());
            assert!(text.contains(says) && said.is_empty(), "{text}");
        }
        let (model, _) = found(Some("m"), vec!["404 Not Found|"], LONG).await;
        assert_eq!(model.unwrap(), "m", "an endpoint without a list");
    }
}
