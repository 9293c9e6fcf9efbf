// A token is sent once; the service keeps it in a cookie that no script reads.
document.getElementById("login").addEventListener("submit", async (event) => {
  event.preventDefault();
  const token = document.getElementById("token").value.trim();
  const answer = await fetch("/ui/session", {
    method: "POST", headers: { authorization: `Bearer ${token}`, "x-muster-page": "1" },
  });
  if (answer.ok) location.href = "/ui/";
  else document.getElementById("refusal").textContent = (await answer.json()).detail;
});
